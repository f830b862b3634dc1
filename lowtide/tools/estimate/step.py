"""Run one training step on fake tensors, and find what it holds at its peak, by category."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import get_gradient_edge

from lowtide import defer_logits
from lowtide.core.pending_gradient import finishing_as_eager
from lowtide.tools.estimate.cuda import Functions, OperatorMemory
from lowtide.tools.estimate.model import EstimatedModel, fake, masks_as_on_data
from lowtide.tools.estimate.ranks import imagined, shard
from lowtide.tools.estimate.setting import Loss, Setting
from lowtide.tools.estimate.tensor_parallel import divide
from lowtide.tools.estimate.tracker import OPTIMIZER, Tracker

Report = Callable[[str], None]


@dataclass(frozen=True)
class Estimate:
    setting: Setting
    loss: Loss
    held: dict[str, int]  # Bytes by category, at the peak.
    when: str
    logits: int  # Bytes of one copy, in the dtype of the products.
    hidden: int  # Bytes of one hidden state before every layer, which checkpointing keeps.
    parameters: int
    device: str = field(default="", compare=False)  # The device that is assumed, in words.

    @property
    def peak(self) -> int:
        return sum(self.held.values())


@dataclass(frozen=True)
class Result:
    """Hold the estimate of one setting and loss, and its measurement."""

    estimate: Estimate
    measured: int | None = None  # In bytes, if it was measured.
    out_of_memory: bool = False


def estimate(
    setting: Setting, loss: Loss, device: str = "cuda", report: Report = lambda words: None
) -> Estimate:
    """Estimate the second of two steps, which has optimizer states.

    What the first step would leave behind is made here. "cpu" as `device` gives what the CPU's own
    operators hold, for comparison. `report` receives a few words on what is being done.
    """
    with ExitStack() as stack:
        report("building the model")
        stack.enter_context(_errors_are_raised_alone())
        if setting.ranks > 1:
            stack.enter_context(imagined(setting))
            # This warns of the logits that a tp_plan gathers; nothing here changes them in place.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        stack.enter_context(FakeTensorMode())
        stack.enter_context(finishing_as_eager(FakeTensor))
        model = fake(setting)
        if setting.tp > 1:
            divide(model.module, setting)
        if setting.fsdp > 1:
            shard(model.module, setting, loss)
        stack.enter_context(masks_as_on_data(model.module))
        tracker = Tracker(model.module, model.classes)
        stack.enter_context(tracker)
        stack.enter_context(OperatorMemory(model.classes, device))
        if device == "cuda":
            stack.enter_context(Functions())
        if loss is Loss.lowtide:
            stack.enter_context(defer_logits(model.module, workspace=setting.workspace))
        stack.enter_context(_modules_reported(model.module, report))
        run(setting, model, tracker, report)
    itemsize = 2 if setting.dtype.value == "autocast" else setting.dtype.weights.itemsize
    return Estimate(
        setting,
        loss,
        tracker.peak,
        tracker.when,
        logits=setting.tokens * model.classes * itemsize,
        hidden=setting.tokens * model.width * model.depth * itemsize,
        parameters=sum(each.numel() for each in model.module.parameters()),
        device=_assumed(device),
    )


def _assumed(device: str) -> str:
    """Name the device whose bytes are estimated: the card at hand decides how the loss runs."""
    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "a CUDA device that is not a Hopper card" if device == "cuda" else "the CPU"


@contextlib.contextmanager
def _errors_are_raised_alone() -> Iterator[None]:
    """Silence the traceback that fake tensors log before an operator refuses its arguments."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def _modules_reported(module: nn.Module, report: Report) -> Iterator[None]:
    count, called = sum(1 for _ in module.modules()), 0

    def tell(*_: object) -> None:
        nonlocal called
        called += 1
        report(f"forward, module {called:,} of about {count:,}")

    handle = nn.modules.module.register_module_forward_pre_hook(tell)
    try:
        yield
    finally:
        handle.remove()


def run(setting: Setting, model: EstimatedModel, tracker: Tracker, report: Report) -> None:
    parameters = [each for each in model.module.parameters() if each.requires_grad]
    optimizer = setting.optimizer.of(parameters)
    tokens_BT = torch.zeros(setting.batch, setting.length, dtype=torch.long)
    if setting.tp > 1:  # Gradients, and so momenta, may be divided otherwise than their parameters.
        _differentiate(setting, model, tokens_BT, tracker, report)
    else:
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
    tracker.phase = "optimizer"
    optimizer.step()
    optimizer.zero_grad()
    for states in optimizer.state.values():
        for each in states.values():
            if isinstance(each, Tensor):
                tracker.put(each, OPTIMIZER)
    tracker.forget_peak()

    _differentiate(setting, model, tokens_BT, tracker, report)
    tracker.phase = "optimizer"
    report("optimizer")
    optimizer.step()
    optimizer.zero_grad()


def _differentiate(
    setting: Setting, model: EstimatedModel, tokens_BT: Tensor, tracker: Tracker, report: Report
) -> None:
    """Run forward and backward."""
    tracker.phase = "forward"
    with setting.dtype.precision("cpu"):
        loss = model.loss(tokens_BT)
    tracker.phase = "backward"
    report("backward")
    # Start from an edge: Functions would intercept loss.backward(), which would then run without
    # Functions.
    root, upstream = get_gradient_edge(loss), torch.ones_like(loss)
    del loss
    torch.autograd.backward(root, upstream)
