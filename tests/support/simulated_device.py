"""Simulate a device that is neither the CPU nor CUDA, for calls on those that this machine lacks.

Its tensors are torch's own, of the dispatch key that torch leaves to other backends (PrivateUse1):
they are sliced, differentiated and cast as those of any device. Their memory is the CPU's, so that
`lowtide.peak_memory("cpu")` sees all of it, and every operation that reaches the device runs on CPU
tensors of the same memory. It raises for what Apple's GPUs (mps) lack, as torch does there:
float64, and each operation for which the installed torch has no kernel of theirs.
"""

import ctypes
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

NAME = "simulated"
REFUSED = (torch.float64, torch.complex128)
OF_CPU, OF_OTHERS = 1, 12  # device types of DLPack
GENERATOR = torch.Generator()  # the generator of the device
_libraries: list[Library] = []


def install() -> str:
    """Make the device known to torch, once in a process, and return its name."""
    if not _libraries:
        module = SimpleNamespace(
            is_initialized=lambda: True,
            is_available=lambda: True,
            current_device=lambda: 0,
            device_count=lambda: 1,
            _is_in_bad_fork=lambda: False,
            manual_seed_all=GENERATOR.manual_seed,
            get_rng_state=lambda device=NAME: GENERATOR.get_state(),
            set_rng_state=lambda state, device=NAME: GENERATOR.set_state(state),
            get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        )
        backend_registration._setup_privateuseone_for_python_backend(NAME, module)
        library = Library("_", "IMPL")
        library.fallback(_compute, "PrivateUse1")
        # torch casts nothing by itself here: what is called under autocast has to.
        library.fallback(fallthrough_kernel, "AutocastPrivateUse1")
        _libraries.append(library)
    return NAME


def _compute(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on CPU tensors of the same memory."""
    schema = operation._schema
    name = schema.name.removeprefix("aten::") + "." * bool(schema.overload_name) + schema.overload_name
    if name not in _known_to_mps():
        raise NotImplementedError(f"{name} has no kernel for mps")
    # There torch adds 0 times what it finds, be it NaN.
    assert not (name.startswith("baddbmm") and kwargs.get("beta") == 0), "a product that reads its result"
    if operation.is_view:
        return _of_metadata(operation, *args, **kwargs)
    given: dict[int, Tensor] = {}

    def on_cpu(tensor: Tensor) -> Tensor:
        twin = tensor
        if tensor.device.type == NAME:
            # An operation may give memory to a result that has none; a borrowed one stays as it is.
            twin = _moved(tensor, OF_CPU) if tensor.numel() else torch.empty_like(tensor, device="cpu")
        elif tensor.dim():
            assert name.startswith("_copy_from"), f"{name} of tensors on two devices"
        given[id(twin)] = tensor
        return twin

    def found(result: Tensor) -> Tensor:
        tensor = given.get(id(result))
        if tensor is not None and tensor.shape == result.shape:
            return tensor
        _check_dtype(result.dtype)
        own = _moved(result, OF_OTHERS)
        if tensor is None:
            return own
        memory = own.untyped_storage(), own.storage_offset(), own.shape, own.stride()
        return _of_metadata(torch.ops.aten.set_.source_Storage_storage_offset, tensor, *memory)

    _check_dtype(kwargs.get("dtype"))
    # Numbers that take the place of tensors arrive as numbers.
    args = tuple(
        torch.tensor(each) if isinstance(each, (int, float)) and str(argument.type) == "Tensor" else each
        for each, argument in zip(args, schema.arguments)
    )
    args, kwargs = tree_map_only(Tensor, on_cpu, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    if any(argument.name == "generator" for argument in schema.arguments):
        kwargs["generator"] = GENERATOR
    if name == "_copy_from":
        return given[id(args[1].copy_(args[0]))]
    return tree_map_only(Tensor, found, operation(*args, **kwargs))


def _of_metadata(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that reads and writes no numbers, by the CPU's kernel."""
    return operation.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype in REFUSED:
        raise TypeError(f"mps has no {dtype}")


@functools.cache
def _known_to_mps() -> frozenset[str]:
    """Return the operations that have a kernel for mps in the installed torch, by its own list."""
    import torchgen
    from torchgen.gen import parse_native_yaml
    from torchgen.model import DispatchKey

    folder = Path(torchgen.__file__).parent / "packaged/ATen/native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    index = parsed.backend_indices[DispatchKey.MPS].index
    return frozenset(
        str(each.func.name)
        for each in parsed.native_functions
        if each.func.name in index or each.structured_delegate in index
    )


class _DLTensor(ctypes.Structure):
    """The first fields of a tensor in a capsule of DLPack."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _moved(tensor: Tensor, device_type: int) -> Tensor:
    """Return a tensor of another device on the same memory."""
    capsule = torch._C._to_dlpack(tensor)
    _DLTensor.from_address(_pointer(capsule, b"dltensor")).device_type = device_type
    return torch._C._from_dlpack(capsule)
