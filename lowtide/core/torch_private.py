"""Bind the private functions of torch that operators use, each with a substitute.

A release of torch may rename these functions. Each is looked up once, at import. Its substitute
gives the answer for which the caller takes its slower way: more memory, more host time, or the
definition in chunks, with the same results. Deferred logits and lowtide's tools use other private
functions.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def _find(path: str) -> Any:
    """Return an attribute of torch, or None where this release has none of that name."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _keep_always() -> bool:
    """Assume that every graph is retained: gradients are scaled into new memory."""
    return True


def _many_modes() -> int:
    """Assume that a mode is on: numbers that only a check would read are not read."""
    return 1


def _profiled() -> bool:
    """Assume that a profile is recorded, in which operators must appear by name."""
    return True


def _hooks_unknown(_: bool = True) -> tuple[None, None]:
    """Assume hooks of saved tensors, whose owner is not known."""
    return None, None


def _level_unknown() -> int | None:
    """Assume a transform, except under torch.compile, which finds transforms itself."""
    return None if torch.compiler.is_compiling() else 0


def _in_no_transform(_: Tensor) -> bool:
    """Return False; raise inside a transform, where its tensors cannot be told from others."""
    if current_level is not _level_unknown and current_level() is not None:
        raise RuntimeError(
            f"torch {torch.__version__} does not say which tensors a transform of torch.func wraps, and "
            "lowtide needs to know: upgrade lowtide, or use a release of torch that it is tested with"
        )
    return False


def _batches_unknown(*_: Any) -> Any:
    """Raise for a batch of autograd that cannot be taken apart."""
    raise RuntimeError(
        f"torch {torch.__version__} does not say what is_grads_batched=True has batched: call autograd.grad "
        "once for each upstream gradient"
    )


# Before 2.11 torch.compile cannot read the properties of a NamedTuple, which the code uses often.
TRACES_PROPERTIES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)
UNTRACED = "torch.compile needs torch 2.11 to trace lowtide"


def breaks_old_graphs(function: Function) -> Function:
    """End compiled graphs at calls of a function, which runs eagerly, in torch before 2.11.

    In these releases the decorator imports torch.compile, which takes a second or two.
    """
    if TRACES_PROPERTIES:
        return function
    return torch.compiler.disable(function, reason=UNTRACED)  # type: ignore[no-any-return]


def _as_strided(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> Tensor:
    """Return a view that begins `first` elements from where the tensor does."""
    return tensor.as_strided(shape, strides, tensor.storage_offset() + first)


def without_legacy_batch(
    tensors: Sequence[Tensor], batched: Sequence[bool]
) -> tuple[int, list[Tensor], list[int | None]]:
    """Return the level of the innermost batch, and each tensor with that batch as a dimension.

    This is the first dimension, or None for a tensor that is not of this batch.
    """
    level = _enter_batch()
    _leave_batch()
    dims: list[int | None] = [None] * len(tensors)
    while all(dim is None for dim in dims):
        level -= 1
        parts = [_batch_of(each, level) if of else None for each, of in zip(tensors, batched)]
        dims = [None if part is None else 0 for part in parts]
    return level, [each if part is None else part for each, part in zip(tensors, parts)], dims


def _batch_of(tensor: Tensor, level: int) -> Tensor | None:
    """Return the tensor with the batch of this level as first dimension; None if it has no such."""
    # A tensor of no such level is expanded to the given size. A batch keeps its own, be it 0.
    part, other = (_without_batch(tensor, level, size, 0) for size in (0, 1))
    return part if len(part) == len(other) else None


# The public equivalents (torch.library.register_autograd, a probe with every setting) cost time.
below_autograd = _find("_C._AutoDispatchBelowAutograd")
after_autograd_keyset = _find("_C._after_autograd_keyset")
fused_sdp_choice = _find("_fused_sdp_choice")

keeps_graph = _find("_C._autograd._get_current_graph_task_keep_graph") or _keep_always
top_saved_tensors_hooks = _find("_C._autograd._top_saved_tensors_default_hooks") or _hooks_unknown
current_node: Any = _find("_C._current_autograd_node")
"""Return the node that backward runs; without this function a call goes through an operator."""
backward_id: Any = _find("_C._current_graph_task_id") or object
"""Return the number of the pass of backward that runs; the substitute never returns one twice."""

dispatch_modes = _find("_C._len_torch_dispatch_stack") or _many_modes
"""The number of modes that see each operation, such as make_fx's and those of fake tensors."""

without_modes: Any = _find("utils._python_dispatch._disable_current_modes") or contextlib.nullcontext
"""Return a context manager in which none of these modes sees an operation."""

function_modes = _find("_C._len_torch_function_stack") or _many_modes
"""The number of modes that see each call of a function."""
profiles = _find("_C._autograd._profiler_enabled") or _profiled

current_level = _find("_C._functorch.maybe_current_level") or _level_unknown
is_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor") or _in_no_transform
is_batched = _find("_C._functorch.is_batchedtensor") or _in_no_transform
is_legacy_batched = _find("_C._functorch.is_legacy_batchedtensor") or _in_no_transform
"""Return True for a batch that autograd makes under is_grads_batched=True."""

as_legacy_batch: Any = _find("_add_batch_dim") or _batches_unknown
_without_batch: Any = _find("_remove_batch_dim") or _batches_unknown
_enter_batch: Any = _find("_C._vmapmode_increment_nesting") or _batches_unknown
_leave_batch: Any = _find("_C._vmapmode_decrement_nesting") or _batches_unknown
outside_transforms: Any = _find("_C._DisableFuncTorch") or contextlib.nullcontext
"""A block in which new tensors belong to no transform; without it some collectives refuse them."""

# What compiled code allocates and views memory by, in half the time of the public functions.
empty_on_cuda: Any = _find("_C._dynamo.guards._empty_strided_cuda")
"""Allocate on the current CUDA device."""
view_of: Any = _find("_C._dynamo.guards._reinterpret_tensor") or _as_strided
"""Return a view of a tensor that autograd does not follow; see `_as_strided`."""

_frames: Any = _find("_C._dynamo.eval_frame")


FRAME_NAMES = ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")


def no_frame_compiled(function: Function) -> Function:
    """Let torch.compile compile no call of a function, nor of what it calls, outside of a trace.

    This is for code that torch itself calls between compiled graphs, with tensors that
    torch.compile does not understand. torch.compiler.disable would import torch.compile, and end
    graphs.
    """
    if all(hasattr(_frames, each) for each in FRAME_NAMES):
        skip = _frames._FrameAction.SKIP
        code = function.__code__  # type: ignore[attr-defined]
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(skip, skip))
    return function


def never_compiled(reason: str) -> Callable[[Function], Function]:
    """Return a decorator that ends graphs at calls of a function, which runs eagerly.

    torch.compiler.disable sets the same marks, but imports torch.compile.
    """

    def mark(function: Function) -> Function:
        marks = {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": reason}
        function.__dict__.update(marks)
        return no_frame_compiled(function)

    return mark


_sdp_order = _find("_C._get_sdp_priority_order") or (lambda: (object(),))


def sdp_settings() -> tuple[object, ...]:
    """Return the settings by which torch chooses one of its attention kernels.

    Where torch does not tell the order in which it prefers kernels, no two answers are equal.
    """
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        *_sdp_order(),
    )


def outside_backward() -> bool:
    """Return True where no pass of backward runs, or where torch does not tell."""
    return backward_id is object or backward_id() == -1
