"""Multiply bfloat16 operands with float32 accumulators on a CPU with bfloat16 units.

The kernels are in gemm.cpp. It is compiled at the first call on a machine, which takes a second or
two. `available()` returns False without a message if the processor has no bfloat16 units, if oneDNN
is off, if torch lacks the functions that gemm.cpp calls, or if there is no compiler. It warns once
if the compiler fails, or if no directory for the library is safe from other users.

Shapes: C rows, D features, V classes. Each row is contiguous; there may be gaps between rows. In a
weight, each column may be contiguous instead.
"""

import ctypes
import functools
import os
import platform
import sys
import threading
import warnings
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("gemm.cpp")
# There is no -march=native, because machines with other processors may share the directory of the
# library. The linker gets no -fopenmp, so that the loader finds the OpenMP symbols in the library
# that torch has loaded. So there is one thread pool, not two.
UNITS = [f"-m{each}" for each in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "fma")]
COMPILED = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", *UNITS)
LINKED = ("-shared",)  # decision 0048
FUNCTIONS = ("lowtide_use", "lowtide_exponentials", "lowtide_multiply", "lowtide_multiply_transposed")
BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"


def available() -> bool:
    """Return True if the functions below can be called."""
    return against() is None


def against() -> str | None:
    """Return why the functions below cannot be called, or None.

    The result is not cached, because oneDNN can be switched on and off.
    """
    if not torch.backends.mkldnn.enabled:
        return "oneDNN, which computes the bfloat16 products, is switched off"
    found = _library()
    return found if isinstance(found, str) else None


def exponentials(
    x_CD: Tensor,
    weight_VD: Tensor,
    reference_C: Tensor,
    target_C: Tensor,
    *,
    scale: float = 1.0,
    bias_V: Tensor | None = None,
    softcap: float = 0.0,
    out_CV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Write exp(z - reference) to out_CV, if given, with 0 at each row's target.

    With u = scale x w + bias, z is u, or softcap tanh(u / softcap) if softcap is not 0. With a soft
    cap, what is written is multiplied by dz/du.

    A target of -1 means that the row's target is not among these classes. Return the sum of each
    row's exponentials, taken before they are rounded, and each row's largest logit other than the
    target's. Both are float32.
    """
    (rows, features), classes = x_CD.shape, weight_VD.shape[0]
    sum_C = torch.empty(rows, dtype=torch.float32)
    max_C = torch.empty(rows, dtype=torch.float32)
    _call(
        "lowtide_exponentials",
        (rows, features, classes),
        _matrix(x_CD, rows, features, torch.bfloat16),
        *_weight(weight_VD),
        ctypes.c_float(scale),
        _vector(bias_V, classes, torch.float32),
        ctypes.c_float(softcap),
        _vector(reference_C, rows, torch.float32),
        _vector(target_C, rows, torch.int64),
        _matrix(out_CV, rows, classes, torch.bfloat16),
        _vector(sum_C, rows, torch.float32),
        _vector(max_C, rows, torch.float32),
    )
    return sum_C, max_C


def multiply(out_CD: Tensor, e_CV: Tensor, weight_VD: Tensor, *, add: bool) -> None:
    """Write e_CV weight_VD to out_CD, or add it to out_CD if `add`."""
    (rows, classes), features = e_CV.shape, weight_VD.shape[1]
    _call(
        "lowtide_multiply",
        (rows, features, classes),
        _matrix(e_CV, rows, classes, torch.bfloat16),
        *_weight(weight_VD),
        _matrix(out_CD, rows, features, torch.float32),
        ctypes.c_bool(add),
    )


def multiply_transposed(out_VD: Tensor, e_CV: Tensor, x_CD: Tensor, *, add: bool) -> None:
    """Write e_CV^T x_CD to out_VD, or add it if `add`; read and write each element once."""
    (rows, classes), features = e_CV.shape, x_CD.shape[1]
    _call(
        "lowtide_multiply_transposed",
        (rows, features, classes),
        _matrix(e_CV, rows, classes, torch.bfloat16),
        _matrix(x_CD, rows, features, torch.bfloat16),
        _matrix(out_VD, classes, features, torch.float32),
        ctypes.c_bool(add),
    )


def _weight(weight_VD: Tensor) -> tuple["_Matrix", ctypes.c_bool]:
    """Return a weight that lies by rows or by columns, and True for columns."""
    outer, inner = weight_VD.stride()
    by_columns = inner != 1 or outer < weight_VD.shape[1]
    stored = weight_VD.t() if by_columns else weight_VD
    rows, columns = stored.shape
    return _matrix(stored, rows, columns, torch.bfloat16), ctypes.c_bool(by_columns)


class _Matrix(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("stride", ctypes.c_int64))


def _matrix(matrix: Tensor | None, rows: int, columns: int, dtype: torch.dtype) -> _Matrix:
    """Check a matrix, and return it in the form that C++ reads; None becomes a null pointer."""
    if matrix is None:
        return _Matrix(None, 0)
    assert (matrix.shape, matrix.dtype, matrix.device.type) == ((rows, columns), dtype, "cpu")
    assert matrix.numel() > 0
    assert columns == 1 or matrix.stride(1) == 1
    assert rows == 1 or matrix.stride(0) >= columns
    return _Matrix(matrix.data_ptr(), matrix.stride(0))


def _vector(vector: Tensor | None, size: int, dtype: torch.dtype) -> ctypes.c_void_p:
    """Check a vector, and return its address; None becomes a null pointer."""
    if vector is None:
        return ctypes.c_void_p(None)
    assert (vector.shape, vector.dtype, vector.device.type) == ((size,), dtype, "cpu")
    assert vector.is_contiguous()
    return ctypes.c_void_p(vector.data_ptr())


def _call(name: str, sizes: tuple[int, ...], *arguments: object) -> None:
    library = _library()
    if isinstance(library, str):
        raise RuntimeError(
            "this call was compiled or exported where the CPU can compute bfloat16 products; "
            f"here {library}. Compile or export it here, or within torch.backends.mkldnn.flags(enabled=False)"
        )
    integers = map(ctypes.c_int64, sizes)
    # ctypes releases the GIL during the call.
    if getattr(library, name)(*integers, *arguments, ctypes.c_int(torch.get_num_threads())):
        raise RuntimeError(
            f"{name[len('lowtide_') :]} of bfloat16 operands failed: no memory, or oneDNN is switched off"
        )


NO_UNITS = "this processor has no units for bfloat16 products"

_locks: dict[int, threading.RLock] = {}  # by process: a fork may copy a held lock


@functools.cache
def _library() -> ctypes.CDLL | str:
    """Return the library, or why there is none; without it, GEMMs run in float32."""
    with _locks.setdefault(os.getpid(), threading.RLock()):
        return _load_once()


@functools.cache
def _load_once() -> ctypes.CDLL | str:
    """Return the library, or why there is none; warn if the compiler or the loader failed."""
    from lowtide.core.bfloat16_units.compiled_library import (  # needed once a process
        NoCompilerError,
        NotLoadedError,
        Source,
        load_compiled,
    )

    if sys.platform != "linux" or platform.machine() != "x86_64" or not _has_units():
        return NO_UNITS
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = [ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p) for name in (BRGEMM, RELEASE)]
    except (OSError, AttributeError):
        return "this torch has no such products for others to call"
    source = Source(SOURCE.stem, SOURCE.read_bytes(), COMPILED, LINKED, FUNCTIONS, torch.__version__)
    try:
        library = load_compiled(source)
    except NoCompilerError as problem:
        return f"they could not be compiled: {problem}"
    except NotLoadedError as problem:
        warnings.warn(
            f"the CPU's products of bfloat16 operands are computed in float32, which is slower: {problem}",
            stacklevel=2,
        )
        return f"they could not be loaded: {problem}"
    return "oneDNN refuses them" if library.lowtide_use(*functions) else library


def _has_units() -> bool:
    """Return True if the processor has the AVX-512 instructions for bfloat16."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if supported is not None:
        return bool(supported())
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
