"""Lightning's Trainer with the callback: the losses and parameters of a run without."""

import copy

import pytest
import torch
import torch.nn.functional as F

lightning = pytest.importorskip("lightning")
import lowtide  # noqa: E402
from lowtide.integrations.lightning import LightningDeferralCallback  # noqa: E402
from tests.deferred.helpers import GPT, V, norm, within_eager  # noqa: E402

# Lightning asks torch by a name that is going; its hints are for whoever trains for long.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*number of training batches.*"),
]


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT()
        self.extra = torch.nn.Linear(16, V)  # as many outputs as the head
        self.seen, self.fails, self.interrupts = [], False, False

    def training_step(self, batch, index):
        if self.fails and index == 1:
            raise RuntimeError("out of luck")
        logits, _ = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        if self.interrupts:
            raise KeyboardInterrupt
        logits, _ = self.model(batch)
        assert isinstance(logits, torch.Tensor)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fitted(module, folder, precision="32-true", callbacks=()):
    """[losses, *parameters] after a run of four batches, two a step."""
    module = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(V, (12, 9), generator=generator)
    loader = torch.utils.data.DataLoader(data, batch_size=3)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        precision=precision,
        accumulate_grad_batches=2,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, loader)
    return [torch.tensor(module.seen), *(each.detach() for each in module.model.parameters())]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_run(precision, tmp_path):
    module = Module()
    callback = LightningDeferralCallback("model.lm_head")
    eager = fitted(module, tmp_path, precision)
    exact = fitted(copy.deepcopy(module).double(), tmp_path, "64-true")
    found = fitted(module, tmp_path, precision, [callback])
    assert (callback.deferral.fused, callback.deferral.materialized) == (4, {})
    assert type(callback.deferral.head) is torch.nn.Linear
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    for ours, theirs, want in zip(found, eager, exact):
        within_eager(ours, theirs, want.double(), dtype, size=8 * norm(want))


def test_head_named(tmp_path):
    with pytest.raises(ValueError, match=r"model.lm_head, extra all have as many outputs.* pass head="):
        fitted(Module(), tmp_path, callbacks=[LightningDeferralCallback()])


def test_fit_after_error(tmp_path):
    module, callback = Module(), LightningDeferralCallback("model.lm_head")
    module.fails = True
    with pytest.raises(RuntimeError, match="out of luck"):
        fitted(module, tmp_path, callbacks=[callback])
    first, module.fails = callback.deferral, False
    assert type(first.head) is torch.nn.Linear
    fitted(module, tmp_path, callbacks=[callback])
    assert (first.fused, callback.deferral.fused) == (1, 4)


def test_fit_interrupted(tmp_path):
    """Lightning ends a fit that Ctrl-C interrupts without on_fit_end."""
    module, callback = Module(), LightningDeferralCallback("model.lm_head")
    module.interrupts = True
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fitted(module, tmp_path, callbacks=[callback])
    assert type(callback.deferral.head) is torch.nn.Linear


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "16-true"])
def test_fabric_loss_outside(precision):
    """Fabric casts the tensors that a forward returns, and leaves deferred logits as they are."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(V, (2, 3, 9), generator=generator)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    model = GPT()
    exact = copy.deepcopy(model)
    wrapped = fabric.setup(model)
    exact.load_state_dict(model.state_dict())  # rounded

    def gradients(model, backward):
        model.zero_grad()
        loss = F.cross_entropy(model(tokens)[0].flatten(0, 1), targets.flatten())
        backward(loss)
        return [loss.detach(), *(each.grad.clone() for each in model.parameters())]

    eager = gradients(wrapped, fabric.backward)
    with lowtide.defer_logits(model) as deferral:
        found = gradients(wrapped, fabric.backward)
    assert (deferral.fused, deferral.materialized) == (1, {})
    for ours, plain, want in zip(found, eager, gradients(exact.double(), torch.Tensor.backward)):
        within_eager(ours, plain, want, model.lm_head.weight.dtype)


def test_collection_takes_logits_whole():
    collections = pytest.importorskip("lightning_utilities.core.apply_func")
    model, tokens = GPT(), torch.randint(V, (3, 9))
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        assert (
            collections.apply_to_collection({"logits": logits}, torch.Tensor, torch.sin)["logits"] is logits
        )
