"""Lightning with a callback more: `python examples/defer_lightning.py`, on CPU. Needs lightning."""

import logging
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.integrations.lightning import LightningDeferralCallback

BATCH, TOKENS, FEATURES, CLASSES = 4, 64, 16, 32000


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, FEATURES)
        self.body = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU())
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)
        self.losses = []

    def training_step(self, batch, index):
        logits = self.head(self.body(self.embedding(batch[:, :-1])))
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(callbacks):
    torch.manual_seed(0)
    model = Model()
    loader = torch.utils.data.DataLoader(torch.randint(100, (3 * BATCH, TOKENS)), batch_size=BATCH)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision="bf16-mixed",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with lowtide.peak_memory("cpu") as peak:
        trainer.fit(model, loader)
    return model.losses[-1], peak.bytes


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of few workers, and of no logger
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name, callbacks in (("as it is", []), ("deferred", [LightningDeferralCallback()])):
        loss, peak = train(callbacks)
        print(f"{name}: loss {loss:.5f}, peak memory {peak / 2**20:.0f} MiB")
