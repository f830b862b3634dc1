"""Products of bfloat16 operands with float32 sums on a CPU that has units for them: torch has none. They are
cpu_products.cpp, compiled when first asked for, a second or two once on a machine. Where there is no
compiler, or anything else is missing, available() is False and nothing is said.

C  rows, D  features, V  classes; rows may lie apart, what is within a row lies side by side."""

import ctypes
import functools
import getpass
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("cpu_products.cpp")
# Not -march=native: a home may be shared by several machines. No OpenMP when linked: what the code needs of
# it is then found in the library that torch has loaded for all, and there is one pool of threads, not two.
UNITS = [f"-m{each}" for each in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "fma")]
COMPILED = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", *UNITS]
LINKED = ["-shared"]
BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"


def available() -> bool:
    """Whether the functions below can be called: asked before each use, as oneDNN can be switched off."""
    return torch.backends.mkldnn.enabled and _library() is not None


def packed_bytes(rows: int, features: int, threads: int | None = None) -> int:
    """What the calls hold beside their operands and results, at most."""
    threads = threads or torch.get_num_threads()
    strip = 2 * 32 * 512
    held = min(rows, 512) if features > 512 else 32
    exponentials = 8 * 64 * rows + threads * (2 * 512 * 128 + strip + 4 * 128 * held)
    multiply = threads * (2 * 512 * 256 + strip)
    padded = -(-rows // 32) * 32
    transposed = 2 * min(512 * padded, max(1 << 19, 64 * padded)) + threads * 2 * 64 * padded
    return max(exponentials, multiply, transposed)


def exponentials(
    x_CD: Tensor,
    weight_VD: Tensor,
    reference_C: Tensor,
    target_C: Tensor,
    *,
    scale: float = 1.0,
    bias_V: Tensor | None = None,
    out_CV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """exp(scale x w + bias - reference) into out_CV, if given, but 0 for each row's target (-1: none).
    Returns each row's sum of them before they are rounded, its largest logit but the target's, float32."""
    (rows, features), classes = x_CD.shape, weight_VD.shape[0]
    _assert_matrix(x_CD, rows, features, torch.bfloat16)
    _assert_matrix(weight_VD, classes, features, torch.bfloat16)
    _assert_vector(reference_C, rows, torch.float32)
    _assert_vector(target_C, rows, torch.int64)
    if bias_V is not None:
        _assert_vector(bias_V, classes, torch.float32)
    if out_CV is not None:
        _assert_matrix(out_CV, rows, classes, torch.bfloat16)
    sum_C = torch.empty(rows, dtype=torch.float32)
    max_C = torch.empty(rows, dtype=torch.float32)
    _call(
        "lowtide_exponentials",
        *map(_integer, (rows, features, classes)),
        _matrix(x_CD),
        _matrix(weight_VD),
        ctypes.c_float(scale),
        *map(_pointer, (bias_V, reference_C, target_C)),
        _matrix(out_CV),
        *map(_pointer, (sum_C, max_C)),
    )
    return sum_C, max_C


def multiply(out_CD: Tensor, e_CV: Tensor, weight_VD: Tensor, *, add: bool) -> None:
    """out_CD = e_CV weight_VD, or out_CD += it."""
    (rows, classes), features = e_CV.shape, weight_VD.shape[1]
    _assert_matrix(out_CD, rows, features, torch.float32)
    _assert_matrix(e_CV, rows, classes, torch.bfloat16)
    _assert_matrix(weight_VD, classes, features, torch.bfloat16)
    sizes = map(_integer, (rows, features, classes))
    _call("lowtide_multiply", *sizes, _matrix(e_CV), _matrix(weight_VD), _matrix(out_CD), ctypes.c_bool(add))


def multiply_transposed(out_VD: Tensor, e_CV: Tensor, x_CD: Tensor, *, add: bool) -> None:
    """out_VD = e_CV^T x_CD, or out_VD += it, each element read and written once."""
    (rows, classes), features = e_CV.shape, x_CD.shape[1]
    _assert_matrix(out_VD, classes, features, torch.float32)
    _assert_matrix(e_CV, rows, classes, torch.bfloat16)
    _assert_matrix(x_CD, rows, features, torch.bfloat16)
    sizes = map(_integer, (rows, features, classes))
    operands = (_matrix(e_CV), _matrix(x_CD), _matrix(out_VD))
    _call("lowtide_multiply_transposed", *sizes, *operands, ctypes.c_bool(add))


def _assert_matrix(matrix: Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
    assert (matrix.shape, matrix.dtype, matrix.device.type) == ((rows, columns), dtype, "cpu")
    assert matrix.numel() > 0
    assert columns == 1 or matrix.stride(1) == 1
    assert rows == 1 or matrix.stride(0) >= columns


def _assert_vector(vector: Tensor, size: int, dtype: torch.dtype) -> None:
    assert (vector.shape, vector.dtype, vector.device.type) == ((size,), dtype, "cpu")
    assert vector.is_contiguous()


_integer = ctypes.c_int64


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


class _Matrix(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("stride", ctypes.c_int64))


def _matrix(matrix: Tensor | None) -> _Matrix:
    return _Matrix(None, 0) if matrix is None else _Matrix(matrix.data_ptr(), matrix.stride(0))


def _call(name: str, *arguments: object) -> None:
    library = _library()
    assert library is not None
    # ctypes lets other Python threads run meanwhile.
    if getattr(library, name)(*arguments, ctypes.c_int(torch.get_num_threads())):
        raise RuntimeError(
            f"{name[len('lowtide_') :]} of bfloat16 operands failed: no memory, or oneDNN is switched off"
        )


@functools.cache
def _library() -> ctypes.CDLL | None:
    """None where anything is missing. No reason is a reason to stop: there are float32 products."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not _has_units():
        return None
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = [ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p) for name in (BRGEMM, RELEASE)]
        library = ctypes.CDLL(str(_compiled()))
        if library.lowtide_use(*functions):
            return None
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None
    return library


def _has_units() -> bool:
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if supported is not None:
        return bool(supported())
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


def _compiled() -> Path:
    """The library's file, made where there is none yet. Its name says all that it depends on; it is written
    under another name first, so that a process finds all of it or nothing."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    source = SOURCE.read_bytes()
    facts = (source, version, compiler.encode(), repr((COMPILED, LINKED, torch.__version__)).encode())
    name = hashlib.sha256(b"\0".join(facts)).hexdigest()[:32]
    folder = _cache_folder()
    library = folder / f"cpu_products_{name}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as own:
        compiled, linked = os.path.join(own, "products.o"), os.path.join(own, "products.so")
        for command in (
            [compiler, *COMPILED, "-c", str(SOURCE), "-o", compiled],
            [compiler, *LINKED, compiled, "-o", linked],
        ):
            subprocess.run(command, capture_output=True, check=True, timeout=120)
        os.replace(linked, library)
    return library


def _compiler() -> str:
    for name in [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]:
        if (found := shutil.which(name)) is not None:
            return found
    raise FileNotFoundError("no C++ compiler")


def _cache_folder() -> Path:
    """In torch.compile's own, whose function for it would import all of torch.compile. One that someone else
    could have filled is refused."""
    base = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if base is None:
        try:
            user = getpass.getuser()
        except (KeyError, ImportError, OSError):
            user = f"uid_{os.getuid()}"
        base = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    folder = Path(base).absolute() / "lowtide"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder
