"""One training step on fake tensors: what it holds at its highest moment, by category."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.graph import get_gradient_edge

from lowtide import defer_logits
from lowtide.estimate.cuda import Functions, Operators, Workspace
from lowtide.estimate.model import Model, fake, masks_as_on_data
from lowtide.estimate.setting import Loss, Setting
from lowtide.estimate.tracker import OPTIMIZER, Tracker
from lowtide.train.config import UserError


@dataclass(frozen=True)
class Estimate:
    setting: Setting
    loss: Loss
    held: dict[str, int]  # bytes by category, at the highest moment
    when: str
    logits: int  # one copy of them, in the dtype of the products
    hidden: int  # one hidden state before every layer: what checkpointing keeps
    parameters: int

    @property
    def peak(self) -> int:
        return sum(self.held.values())


def estimate(setting: Setting, loss: Loss, device: str = "cuda") -> Estimate:
    """The second of two steps, where optimizer states are; what the first would leave behind is made here.

    `device` "cuda" is the promise; "cpu" is what the CPU's own operators save, for comparison with it.
    """
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        model = fake(setting)
        stack.enter_context(masks_as_on_data(model.module))
        tracker = Tracker(model.module, model.classes)
        stack.enter_context(tracker)
        stack.enter_context(Operators(model.classes, device))
        if device == "cuda":
            stack.enter_context(Functions())
        if setting.workspace is not None:
            stack.enter_context(Workspace(setting.workspace))
        if loss is Loss.lowtide:
            stack.enter_context(defer_logits(model.module))
        try:
            run(setting, model, tracker)
        except (DataDependentOutputException, DynamicOutputShapeException) as problem:
            raise UserError(
                f"{setting.model}: a step of this model looks at data ({problem}), and fake tensors have none"
            ) from problem
    itemsize = 2 if setting.dtype.value == "autocast" else setting.dtype.weights.itemsize
    return Estimate(
        setting,
        loss,
        tracker.peak,
        tracker.when,
        logits=setting.tokens * model.classes * itemsize,
        hidden=setting.tokens * model.width * model.depth * itemsize,
        parameters=sum(each.numel() for each in model.module.parameters()),
    )


def run(setting: Setting, model: Model, tracker: Tracker) -> None:
    optimizer = setting.optimizer.of(model.module.parameters())
    tracker.start("optimizer")
    for parameter in model.module.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for states in optimizer.state.values():
        for each in states.values():
            if isinstance(each, torch.Tensor):
                tracker.put(each, OPTIMIZER)
    tokens_BT = torch.zeros(setting.batch, setting.length, dtype=torch.long)
    tracker.forget_peak()

    tracker.start("forward")
    with setting.dtype.precision("cpu"):
        loss = model.loss(tokens_BT)
    tracker.start("backward")
    # From an edge, not from the tensor: whose backward would be handed to Functions, and run without it.
    root, upstream = get_gradient_edge(loss), torch.ones_like(loss)
    del loss
    torch.autograd.backward(root, upstream)
    del root
    tracker.start("optimizer")
    optimizer.step()
    optimizer.zero_grad()
