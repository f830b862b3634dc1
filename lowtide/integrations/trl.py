"""Define a callback for the trainers of TRL (1.15 and later).

Use it as

    GRPOTrainer(..., callbacks=[TRLDeferralCallback()])

It supports SFTTrainer, DPOTrainer, GRPOTrainer, KTOTrainer and RLOOTrainer. They ask their model
for log-probabilities: `model(..., labels=labels, fused_lm_head=True)`. To answer, they replace the
model's forward by one that multiplies by `lm_head.weight` itself and never calls the head. While
this callback is active, the model's own forward answers instead, with deferred logits.

Shapes: B sequences, T tokens (one less after the shift), V classes; n tokens that have a label.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from trl.trainer.utils import FusedCausalLMOutput

from lowtide.core.errors import ArgumentError
from lowtide.deferred import defer_logits
from lowtide.deferred.operations.log_probs import log_probs
from lowtide.integrations.callback import DeferralCallback

IGNORED = -100
REFUSED = {
    "cast_lm_head_to_fp32": "products are summed in float32 anyway",
    "use_weighting": "these weights need sums of squared probabilities, which lowtide does not have",
}


class TRLDeferralCallback(DeferralCallback, TrainerCallback):
    """Compute log-probabilities, entropies and losses without logits, in training and evaluation.

    The operator of :func:`lowtide.linear_log_probs` computes them. It includes the model's own
    operations on its logits (scale, soft cap).

    Args:
        ref_model: the trainer's reference model, if it is to be deferred too. Without this argument
            TRL's own forward computes its log-probabilities.
        workspace: bytes that each fused call may hold; None for the default of
            `lowtide.defer_logits`.

    Attributes:
        fused: the number of losses of the trained model that were computed without logits.
        materialized: for each operation, how often it materialised that model's logits.

    Raises:
        ValueError: when training begins, for a model that no trainer of TRL has prepared, and for
            options whose results would differ (`cast_lm_head_to_fp32`, `use_weighting`).
    """

    def __init__(self, ref_model: nn.Module | None = None, *, workspace: int | None = None) -> None:
        super().__init__(workspace)
        self.ref_model = ref_model
        self.forwards: list[Forward] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for name, reason in REFUSED.items():
            if getattr(args, name, False):
                raise ArgumentError(
                    f"lowtide's TRLDeferralCallback cannot take {name}=True: {reason}; leave it False"
                )
        self.on_train_end(args, state, control)  # An earlier run may have ended in an error.
        self.forwards = [Forward(model, args, self.workspace)]
        if self.ref_model is not None:
            self.forwards.append(Forward(self.ref_model, args, self.workspace))
        self.deferral = self.forwards[0].deferral

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for each in self.forwards:
            each.undo()
        self.forwards = []


class Forward:
    """Replace the forward of a TRL model until `undo()`, for calls with `fused_lm_head`."""

    def __init__(self, model: Any, args: Any, workspace: int | None = None) -> None:
        model = getattr(model, "module", model)  # The model inside DistributedDataParallel.
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        if "forward" not in vars(self.model):
            raise ArgumentError(
                "lowtide.integrations.trl.TRLDeferralCallback is for models that a trainer of TRL has "
                "prepared; for others there is lowtide.integrations.transformers.TransformersDeferralCallback"
            )
        self.temperature = getattr(args, "temperature", 1.0)
        self.with_means = any(kind.__name__ in ("DPOConfig", "KTOConfig") for kind in type(args).__mro__)
        self.deferral = defer_logits(self.model, workspace=workspace)
        # `generate` looks there for position_ids, logits_to_keep and the images of a prompt.
        self.__signature__ = inspect.signature(self.model.forward)
        self.theirs, self.model.forward = self.model.forward, self

    def undo(self) -> None:
        self.model.forward = self.theirs
        self.deferral.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return TRL's own forward of the copied model: a copy is not deferred."""
        return copy.deepcopy(self.theirs, memo)

    def __reduce__(self) -> Any:
        return self.theirs.__reduce__()

    def __call__(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            # Without gradients the caller may be generate, which needs real logits.
            return self._called(torch.is_grad_enabled() and self.deferral.head.training, *args, **kwargs)
        labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        if labels is None and shifted is None:
            raise ArgumentError("fused_lm_head=True needs labels or shift_labels")
        items = kwargs.pop("num_items_in_batch", None)
        output = self._called(True, *args, **kwargs | {"use_cache": False})
        logits = output.logits / self.temperature
        if shifted is None:
            logits, shifted = logits[:, :-1], labels[:, 1:]
        return self.answer(logits, shifted, getattr(output, "aux_loss", None), items)

    def _called(self, deferring: bool, *args: Any, **kwargs: Any) -> Any:
        head = self.deferral.head
        # Set training mode, since a head defers its logits only then.
        mode, head.training = head.training, deferring
        try:
            return self.theirs(*args, **kwargs)
        finally:
            head.training = mode

    def answer(self, logits: Any, labels: Tensor, aux_loss: Tensor | None, items: Any) -> FusedCausalLMOutput:
        counted = labels != IGNORED  # [B, T]
        logits_nV, labels_n = logits[counted], labels[counted]
        found = log_probs(logits_nV, labels_n)

        def spread(each_n: Tensor) -> Tensor:  # [B, T]
            return each_n.new_zeros(counted.shape).masked_scatter(counted, each_n)

        log_prob = spread(found.log_prob)
        loss = -log_prob.sum() / (counted.sum().clamp(min=1) if items is None else items)
        if aux_loss is not None:
            loss = loss + getattr(self.model.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
        means = None
        if self.with_means:
            with torch.no_grad():
                means = spread(logits_nV.mean(-1).float())
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=log_prob,
            entropy=spread(found.entropy),
            mean_logits=means,
            is_top1=spread(found.argmax == labels_n),
            label_mask=counted,
            aux_loss=aux_loss,
        )
