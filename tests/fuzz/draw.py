"""Random numbers, tensors and memory layouts. One integer determines all that a case draws."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUTS = ("permuted", "padded", "sliced", "offset", "stepped", "odd strides", "expanded", "negated")


class Draw(random.Random):
    """The generator of one case, which also collects the words that describe it."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        super().__init__(seed)
        self.device = device
        self.words: list[str] = []
        self.generator = torch.Generator().manual_seed(seed)

    def __reduce__(self) -> Any:
        raise TypeError("a Draw is used by one case")

    @property
    def description(self) -> str:
        return " ".join(self.words)

    def note(self, *words: str, **named: Any) -> None:
        self.words += [*words, *(f"{name}={_short(value)}" for name, value in named.items())]

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def pick(self, named: str, choices: Sequence[Any]) -> Any:
        """One of `choices`; named in the description."""
        value = self.choice(choices)
        self.note(**{named: value})
        return value

    def size(self, most: int, least: int = 0) -> int:
        """Small numbers more often than large ones; often beside a multiple of a tile's size."""
        if self.chance(0.06):
            return min(max(least, self.choice((0, 1))), most)
        number = int(2 ** self.uniform(0, (most + 1).bit_length() - 1e-9))
        if number > 8 and self.chance(0.5):
            step = self.choice([step for step in (8, 16, 32, 64, 128) if step <= number])
            number = number // step * step + self.choice((-1, 0, 0, 1))
        return min(max(least, number), most)

    def dtype(self) -> torch.dtype:
        return self.choices(FLOATS, (4, 3, 3, 2))[0]

    def normal(self, shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        values = torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)
        return (values * scale).to(self.device, dtype)

    def uniform_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.rand(tuple(shape), generator=self.generator, dtype=torch.float64).to(self.device, dtype)

    def integers(self, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, tuple(shape), generator=self.generator).to(self.device, dtype)

    def mask(self, probability: float, shape: Sequence[int]) -> Tensor:
        return (torch.rand(tuple(shape), generator=self.generator) < probability).to(self.device)

    # Memory.

    def laid_out(self, name: str, tensor: Tensor, *, expand: bool = True) -> Tensor:
        """The same numbers (of an expanded tensor fewer) in a layout that the description names."""
        if tensor.dim() == 0 or self.chance(0.5):
            return tensor
        layout = self.choice(LAYOUTS)
        if layout == "expanded" and not expand:
            layout = "offset"
        self.note(f"{name}:{layout.replace(' ', '-')}")
        return getattr(self, "_" + layout.replace(" ", "_"))(tensor)

    def _permuted(self, tensor: Tensor) -> Tensor:
        order = list(range(tensor.dim()))
        self.shuffle(order)
        inverse = [order.index(dim) for dim in range(tensor.dim())]
        return tensor.permute(order).contiguous().permute(inverse)

    def _padded(self, tensor: Tensor) -> Tensor:
        return self.within(tensor, tensor.dim() - 1, 0, self.choice((1, 3, 8)))

    def _sliced(self, tensor: Tensor) -> Tensor:
        return self.within(tensor, self.randrange(tensor.dim()), self.randint(1, 7), self.randint(0, 2))

    def within(self, tensor: Tensor, dim: int, before: int, after: int) -> Tensor:
        """A slice of a tensor that is wider along `dim`, with NaN around it."""
        shape = list(tensor.shape)
        shape[dim] += before + after
        whole = _filled(shape, tensor)
        part = whole.narrow(dim, before, tensor.shape[dim])
        part.copy_(tensor)
        return part

    def _offset(self, tensor: Tensor) -> Tensor:
        """Contiguous, and not at the beginning of its memory."""
        before = self.randint(1, 7)
        flat = _filled([tensor.numel() + before], tensor)
        part = flat[before:].view(tensor.shape)
        part.copy_(tensor)
        return part

    def _stepped(self, tensor: Tensor) -> Tensor:
        dim = self.randrange(tensor.dim())
        shape = list(tensor.shape)
        shape[dim] *= 2
        whole = _filled(shape, tensor)
        part = whole[(slice(None),) * dim + (slice(None, None, 2),)]
        part.copy_(tensor)
        return part

    def _odd_strides(self, tensor: Tensor) -> Tensor:
        """Dimensions of size 1 may have any stride."""
        strides = [
            self.choice((0, 1, 3, 7, stride)) if size == 1 else stride
            for size, stride in zip(tensor.shape, tensor.stride())
        ]
        return tensor.as_strided(tensor.shape, strides)

    def _expanded(self, tensor: Tensor) -> Tensor:
        dim = self.randrange(tensor.dim())
        return tensor.narrow(dim, 0, min(1, tensor.shape[dim])).expand(tensor.shape)

    def _negated(self, tensor: Tensor) -> Tensor:
        """A view with torch's negative bit: what lies in memory has the other sign."""
        if tensor.dtype not in (torch.float32, torch.float64):
            return self._offset(tensor)
        negated = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
        assert negated.is_neg()
        return negated


def _filled(shape: Sequence[int], like: Tensor) -> Tensor:
    """What no one may read."""
    if like.is_floating_point():
        return torch.full(tuple(shape), torch.nan, dtype=like.dtype, device=like.device)
    return torch.full(tuple(shape), 77, dtype=like.dtype, device=like.device)


def _short(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor):
        return f"{_short(value.dtype)}{list(value.shape)}".replace(" ", "")
    return str(value).replace(" ", "")
