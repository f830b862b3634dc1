"""A program: lines of Python on logits `z`, and what it is run on. Its text is all that a case is.

The same text runs on the model as it is, on the model with deferred logits, and in float64, where
every floating-point dtype in it means float64 and nothing is changed behind the logits' back.

Shapes: B sequences, T tokens, D features, V classes.
"""

import contextlib
import copy
import dataclasses
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import lowtide
from tests.fuzz.compare import STEP

NAMES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
WHOLE = {"i64": torch.int64, "i32": torch.int32, "u8": torch.uint8, "b8": torch.bool}


@dataclasses.dataclass(frozen=True)
class Line:
    text: str
    kind: str = ""
    """"changes" an operand in place, exchanges its "data", or changes logits "in place"."""


@dataclasses.dataclass
class Program:
    seed: int
    dtype: str
    sizes: tuple[int, int, int, int]  # B, T, D, V
    bias: bool
    tied: bool
    adapter: str | None
    """The dtype of an adapter within the head."""
    frozen: str
    around: str
    """What all lines run in: nothing, autocast, no_grad, inference_mode, or one checkpoint."""
    lines: list[Line]

    def __str__(self) -> str:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        named = (f"{name}={value}" for name, value in own.items() if name not in ("lines", "seed") and value)
        return f"{' '.join(named)} | " + "; ".join(line.text for line in self.lines)

    def has(self, *kinds: str) -> bool:
        return any(line.kind in kinds for line in self.lines)

    @property
    def widens(self) -> bool:
        """Return True if a result may be float32 where torch's is half precision."""
        return any(each in line.text for line in self.lines for each in ("logsumexp", "gather", "arange"))


class Head(nn.Linear):
    """A linear layer, perhaps with an adapter of another dtype beside it."""

    def __init__(self, D: int, V: int, bias: bool, adapter: torch.dtype | None) -> None:
        super().__init__(D, V, bias=bias)
        self.down = None if adapter is None else nn.Linear(D, 2, bias=False)
        self.up = None if adapter is None else nn.Linear(2, V, bias=False)
        self.adapter = adapter

    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden)
        if self.down is None:
            return logits
        return logits + self.up(self.down(hidden.to(self.down.weight.dtype)))


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        _, _, D, V = program.sizes
        dtype, adapter = NAMES[program.dtype], program.adapter and NAMES[program.adapter]
        self.e = nn.Embedding(V, D)
        self.head = Head(D, V, program.bias, adapter)
        self.to(dtype)
        generator = torch.Generator().manual_seed(program.seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
        if adapter is not None:
            self.head.down.to(adapter), self.head.up.to(adapter)
        if program.tied:
            self.head.weight = self.e.weight
        for name in program.frozen.split():
            getattr(self, name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.e(x)))


class Run:
    """The names that lines see, and what has become of them."""

    def __init__(self, program: Program, way: str, device: str, noise: int = 0) -> None:
        self.program, self.way, self.device = program, way, device
        self.own = way in ("plain", "deferred")
        self.noise = torch.Generator().manual_seed(noise)
        self.operands: dict[int, Tensor] = {}
        self.trace: list[tuple[Any, ...]] = []
        self.largest = 0.0
        model = Model(program).to(device)
        if not self.own:
            for parameter in model.parameters():
                parameter.data = self.converted(parameter.data)
        self.model = model
        deferred = way in ("deferred", "deferred exact")
        self.deferral = lowtide.defer_logits(model, head=model.head) if deferred else None
        B, T, _, V = program.sizes
        tokens = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(program.seed + 1))
        dtypes = {name: dtype if self.own else self.converted_dtype for name, dtype in NAMES.items()}
        self.names: dict[str, Any] = {
            **{"torch": torch, "F": F, "nn": nn, "copy": copy, "checkpoint": checkpoint, "device": device},
            **{"tree_map": tree_map, "tree_leaves": tree_leaves, "t": self.tensor, **dtypes, **WHOLE},
            **{"model": model, "head": model.head, "e": model.e, "x": tokens.to(device), "V": V},
            **{"lowest": torch.finfo(NAMES[program.dtype]).min, "autocast": self.autocast},
        }

    @property
    def converted_dtype(self) -> torch.dtype:
        return torch.float32 if self.way == "single" else torch.float64

    def converted(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.converted_dtype)
        if self.way == "perturbed":
            return tensor * (1 + STEP * torch.randn(tensor.shape, generator=self.noise).to(tensor))
        return tensor

    def tensor(self, k: int, *shape: int, dtype: Any = None, high: int = 3, learned: bool = False) -> Tensor:
        """Operand number k: made once, so that a checkpoint finds it again."""
        if k not in self.operands:
            generator = torch.Generator().manual_seed(self.program.seed + 17 * (k + 1))
            if isinstance(dtype, str):
                values = torch.randn(shape, generator=generator).to(NAMES[dtype])
                values = values if self.own else self.converted(values)
            else:
                values = torch.randint(high, shape, generator=generator).to(dtype)
            self.operands[k] = values.to(self.device).requires_grad_(learned)
        return self.operands[k]

    def autocast(self, dtype: Any) -> Any:
        device = torch.device(self.device).type
        return torch.autocast(device, NAMES[dtype]) if self.own else contextlib.nullcontext()

    def line(self, line: Line) -> None:
        if line.kind in ("changes", "data") and not self.own:
            return
        text = line.text
        if not self.own:
            text = re.sub(r"\.(float|half|bfloat16|double)\(\)", ".to(f32)", text)
        exec(text, self.names)
        z = self.names.get("z")
        if z is not None:
            self.trace.append((tuple(z.shape), z.dtype, z.requires_grad))
            if self.own and self.way == "plain" and z.is_floating_point() and z.numel():
                self.largest = max(self.largest, z.detach().double().nan_to_num(0, 0, 0).abs().max().item())

    def context(self) -> Any:
        around = self.program.around
        if around.startswith("autocast"):
            return self.autocast(around.split()[1])
        contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
        return contexts.get(around, contextlib.nullcontext)()

    def result(self) -> Any:
        """What the lines leave in `r`."""

        def body(*_: Any) -> Any:
            for line in self.program.lines:
                self.line(line)
            return self.names["r"]

        if self.program.around.startswith("checkpoint"):
            anchor = torch.zeros((), requires_grad=True, device=self.device)
            return checkpoint(body, anchor, use_reentrant=self.program.around.endswith("reentrant"))
        with self.context():
            return body()

    def leaves(self) -> dict[str, Tensor]:
        named = {name: leaf for name, leaf in self.model.named_parameters() if leaf.requires_grad}
        learned = {f"a{k}": each for k, each in self.operands.items() if each.requires_grad}
        return named | learned
