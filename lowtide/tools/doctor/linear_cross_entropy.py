"""Report how linear_cross_entropy computes a call: the plan that it would make.

The plan is made from tensors without data.

Shapes: N tokens, D features, V classes.
"""

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.bfloat16_units import gemm
from lowtide.core.errors import ArgumentError
from lowtide.ops.linear_cross_entropy.definition.head import (
    ROW_FACTORS,
    Arguments,
    Head,
    Options,
    VocabShard,
    scale_of,
)
from lowtide.ops.linear_cross_entropy.definition.validation import check_arguments, check_loss_options
from lowtide.ops.linear_cross_entropy.operator.planner import (
    choose_engine,
    make_plan,
    predicted_seconds,
    with_graph_facts,
)
from lowtide.ops.linear_cross_entropy.planning.byte_counts import padded
from lowtide.ops.linear_cross_entropy.planning.call import CPU_UNITS, Call, CallKind, NeedsGrad
from lowtide.ops.linear_cross_entropy.planning.division.cost_model import three_gemms_seconds
from lowtide.ops.linear_cross_entropy.planning.operands import with_aligned_operands
from lowtide.ops.linear_cross_entropy.planning.plan import Plan
from lowtide.ops.linear_cross_entropy.ranks.agreement import check_layout
from lowtide.tools.doctor.collectives import Collective, collectives
from lowtide.tools.environment import dtype_name, present
from lowtide.tools.units import readable

WEIGHT_GRADIENTS = {
    "single_product": "one product of all tokens, rounded as it leaves",
    "accumulate": "summed over the chunks in {sum_dtype}",
    "packed": "summed over the chunks, in part in the gradient's own memory: {split}",
    "class_blocks": "class block by class block, {block_classes} classes and {block_rows} tokens at a time: "
    "one product more{stored}",
}

KERNELS = {
    "cpu_exponentials": "C++, with oneDNN's bfloat16 products; no pass over the logits",
    "exponentials": "Triton; no pass over the logits",
    "cpu_logits": "C++, with oneDNN's bfloat16 products, and plain torch",
    "logits_torch": "plain torch",
}


@dataclass(frozen=True)
class AskedLossCall:
    """Hold what the plan of a call depends on, by the names of the function's arguments.

    A z-loss, row weights and a logit scale that is a number do not change the plan. N and V count
    the tokens and classes of all ranks.
    """

    N: int
    D: int
    V: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    bias: bool = False
    gradients: bool = True
    softcap: float | None = None
    label_smoothing: float = 0.0
    logit_scale: float | None = None
    z_loss: float = 0.0
    weight: bool = False
    """True for class weights."""
    reduction: str = "mean"
    workspace: int | None = None
    backend: str = "auto"
    autocast: torch.dtype | None = None
    probabilities: torch.dtype | None = None
    row_weight: bool = False
    ranks: int = 1
    """The ranks that the classes are divided over."""
    tokens_sharded: bool = False
    segments: int | None = None
    log_probs: bool = False
    """True for linear_log_probs, which has no reduction and no weights."""

    @property
    def own_classes(self) -> int:
        """Return the classes of a rank; the last rank may have fewer."""
        return -(-self.V // self.ranks)

    @property
    def own_tokens(self) -> int:
        """Return the most tokens that a rank passes."""
        return -(-self.N // self.ranks) if self.tokens_sharded else self.N

    def plan(self) -> Plan:
        """Return the plan; raise any error that the call itself would raise."""
        call = self._given()
        with FakeTensorMode(), torch.no_grad():
            return make_plan(with_graph_facts(call))

    def _check(self) -> None:
        """Raise an ArgumentError for options that no call can have together, or not here."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ArgumentError(
                "device must be one of this machine, as the plan depends on the card, got 'cuda'; "
                "here that is 'cpu'"
            )
        if self.tokens_sharded and self.ranks == 1:
            raise ArgumentError("--tokens-sharded needs --ranks 2 or more, got 1")
        if self.tokens_sharded and self.probabilities is not None:
            raise ArgumentError(
                "--tokens-sharded needs targets that are classes, got --probabilities; leave one of them out"
            )
        if (self.ranks > 1 or self.segments is not None) and self.backend == "reference":
            raise ArgumentError(
                "backend must be 'auto', 'triton' or 'torch' where classes are divided over ranks, or into "
                "segments, got 'reference'"
            )
        if self.log_probs and (self.probabilities is not None or self.weight or self._row_factors):
            raise ArgumentError(
                "--log-probs is linear_log_probs, which takes targets that are classes and no weights, got "
                "--probabilities, --weight or --row-weight; leave them out"
            )
        changed = self.label_smoothing or self.z_loss or self.reduction != "mean"
        if self.log_probs and changed:
            raise ArgumentError(
                "--log-probs is linear_log_probs, which returns numbers by row and has no such option, got "
                "--label-smoothing, --z-loss or --reduction; leave them out"
            )
        if self.segments is not None:
            layout = [
                (first, min(self.own_classes, self.V - first))
                for first in (min(rank * self.own_classes, self.V) for rank in range(self.ranks))
            ]
            check_layout(layout, self._shard())

    def _given(self) -> Call:
        """Return the call of tensors without data; raise any error that checking it raises."""
        self._check()
        wants = self.gradients
        needs_grad = NeedsGrad((wants,), (wants,), wants and self.bias, False)
        casts = torch.autocast(self.device, self.autocast, enabled=self.autocast is not None)
        with FakeTensorMode(), torch.no_grad(), casts:
            N, V = self.own_tokens, self.own_classes
            input_ND, weight_VD = self._empty(N, self.D), self._empty(V, self.D)
            bias_V = self._empty(V) if self.bias else None
            target = torch.empty(N, dtype=torch.int64, device=self.device)
            if self.probabilities is not None:
                target = torch.empty(N, V, dtype=self.probabilities, device=self.device)
            class_weight_V = self._empty(V) if self.weight else None
            arguments = Arguments(
                logit_scale=self.logit_scale,
                softcap=self.softcap,
                weight=class_weight_V,
                reduction=self.reduction,
                label_smoothing=self.label_smoothing,
                z_loss=self.z_loss,
                workspace=self.workspace,
                backend=self.backend,
                shard=self._shard() if self.ranks > 1 or self.segments else None,
            )
            check_arguments((input_ND,), (weight_VD,), target, bias_V, arguments)
            check_loss_options(arguments, target)
            options = Options.of(input_ND, arguments)
            call_kind = CallKind(needs_grad, self.log_probs, self.probabilities, self.weight)
            scale = scale_of(self.logit_scale, input_ND)
            head = Head((input_ND,), (weight_VD,), bias_V, scale)
            return Call(with_aligned_operands(head, options), options, call_kind)

    def _shard(self) -> VocabShard:
        return VocabShard(
            ranks=self.ranks,
            num_classes=self.V,
            tokens_sharded=self.tokens_sharded,
            segments=self.segments or 0,
        )

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def describe(self) -> dict[str, str]:
        """Return each decision by its name, in the order of reading."""
        if self.backend == "reference":
            self._given()
            return {"engine": "reference", "why": "it is named: all logits at once"}
        plan, rows = self.plan(), self.rows()
        tokens = self.own_tokens * self.ranks if self.tokens_sharded else self.N
        chunks = -(-tokens // rows) if tokens else 0
        found = {"engine": plan.engine, "kernels": KERNELS.get(plan.engine, "Triton")}
        reasons = choose_engine(self._given()).reasons
        # Say only why the usual engines for this target and device are not taken.
        usual = ["soft_targets" if self.probabilities is not None else "exponentials"]
        if self.device == "cpu" and plan.backend == "torch":
            usual = [*CPU_UNITS]
        against: dict[str, str] = {}  # one engine for each reason
        for engine in usual:
            if engine in reasons:
                against.setdefault(reasons[engine], f"not {engine}: {reasons[engine]}")
        if against:
            if usual == [*CPU_UNITS] and gemm.against() == gemm.NO_UNITS:
                against.setdefault(gemm.NO_UNITS, f"and {gemm.NO_UNITS}")
            found["why"] = "; ".join(against.values())
        found["workspace"] = readable(plan.workspace, ",.0f", at_least=10)
        if self.workspace is None:
            found["workspace"] += ", the default"
        found["products in"] = dtype_name(plan.compute_dtype)
        found["rows"] = f"{rows} a chunk, {chunks} chunk{'s' * (chunks != 1)}"
        if plan.operand_classes < self.own_classes:
            why = f"from {dtype_name(self.dtype)} to {dtype_name(plan.compute_dtype)}"
            found["weight"] = f"copied {plan.operand_classes} classes at a time, {why}"
        if self.gradients:
            found["weight gradient"] = WEIGHT_GRADIENTS[plan.weight_gradient].format(
                sum_dtype=dtype_name(plan.sum_dtype),
                split=f"{plan.sum_bits} bits, {plan.sum_bits - 16} for each weight beside it"
                if plan.backend == "triton"
                else "float32, two bytes for each weight beside it",
                block_classes=plan.block_classes,
                block_rows=plan.block_rows,
                stored=f", but for {plan.stored_rows} tokens" if plan.stored_rows else "",
            )
        predicted = self.predicted()
        if predicted is not None:
            seconds, ratio = predicted
            found["predicted"] = f"{1e3 * seconds:.3g} ms on an H200, {ratio:.2f} of three GEMMs"
        if self.ranks > 1:
            found[f"{self.ranks} ranks"] = self.divided()
        return found

    def predicted(self, ignored: float = 0.0) -> tuple[float, float] | None:
        """Return the predicted seconds of loss and gradients, and their ratio to the aligned floor.

        Return None where no model covers the call. `ignored` is the share of ignored rows. The
        prediction assumes that the host keeps ahead of the card.
        """
        call = self._given()
        with FakeTensorMode(), torch.no_grad():
            seconds = predicted_seconds(with_graph_facts(call), ignored)
        if seconds is None:
            return None
        return seconds, seconds / three_gemms_seconds(self.N, padded(self.D), padded(self.V))

    def rows(self) -> int:
        """Return the tokens of a chunk, of all ranks together."""
        rows = self.plan().rows
        if not self.tokens_sharded:
            return rows
        return max(1, min(rows // self.ranks, self.own_tokens)) * self.ranks

    def divided(self) -> str:
        """Return in one line what a rank has, and what it moves."""
        tokens = f"{self.own_tokens:,} of {self.N:,} tokens" if self.tokens_sharded else "all tokens"
        classes = f"{self.own_classes:,} of {self.V:,} classes"
        if self.segments:
            classes += f", in segments of {self._shard().segment_classes:,},"
        has = f"each has {classes} and {tokens}"
        return f"{has}; moves: {', '.join(map(str, self.collectives()))}"

    def collectives(self) -> list[Collective]:
        """Return what a divided call moves, in the order of docs/howto/divided_head.md."""
        return collectives(
            self.plan(),
            tokens=self.N,
            rank_tokens=self.own_tokens,
            features=self.D,
            chunk=self.rows(),
            row_factors=self._row_factors,
            compared=self._compared(),
        )

    @property
    def _row_factors(self) -> int:
        return sum(getattr(self, name) for name in ROW_FACTORS)

    def _compared(self) -> int:
        """Return how many tensors the ranks compare on the device (ranks/equal_values.py)."""
        if self.device == "cpu":
            return 0
        by_row = 0 if self.tokens_sharded else (self.probabilities is None) + self._row_factors
        return by_row + (self.logit_scale is not None)


# The head of Llama 3 8B, and enough tokens for its loss to matter.
USUAL = (8192, 4096, 128_256)


def table() -> list[tuple[str, str, str, str]]:
    """Return dtype and device of usual calls, with engine, kernels and the engine's reason."""
    devices = [device for device in ("cuda", "mps", "xpu", "cpu") if present(device)]
    lines = []
    for device in devices:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            found = AskedLossCall(*USUAL, dtype=dtype, device=device).describe()
            kernels = f"{found['kernels']}, products in {found['products in']}"
            lines.append((f"{dtype_name(dtype)} on {device}", found["engine"], kernels, found.get("why", "")))
    return lines
