"""C modules of one name, as Triton builds them to launch kernels, loaded in several threads."""

import shutil
import subprocess
import sysconfig

import pytest

pytest.importorskip("triton")

from triton.runtime import build

from lowtide.core.compile_ahead.launchers import LOAD, load_apart

SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *none) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.fixture(scope="module")
def c_modules(tmp_path_factory):
    """Files of two modules of one name, whose functions return 0 and 1."""
    if not hasattr(build, LOAD) or shutil.which("gcc") is None:
        pytest.skip("needs gcc, and a Triton that loads modules by that name")
    paths = []
    for number in range(2):
        folder = tmp_path_factory.mktemp("launcher")
        source, built = folder / "launcher.c", folder / "__triton_launcher.so"
        source.write_text(SOURCE.replace("NUMBER", str(number)))
        include = sysconfig.get_paths()["include"]
        subprocess.run(["gcc", "-shared", "-fPIC", f"-I{include}", source, "-o", built], check=True)
        paths.append(str(built))
    return paths


def _function_found_late(first: str, second: str) -> int:
    """Return what a thread finds in its module, if another loads one again before it looks."""
    load = getattr(build, LOAD)
    load("__triton_launcher", second)
    own = load("__triton_launcher", first)
    load("__triton_launcher", second)
    return own.launch()


def test_launchers_of_threads_are_apart(c_modules, monkeypatch):
    """Otherwise the function of the other module is found, which reads other arguments."""
    load = getattr(build, LOAD)
    monkeypatch.setattr(build, LOAD, getattr(load, "original", load))
    load_apart()
    once = getattr(build, LOAD)
    load_apart()
    assert getattr(build, LOAD) is once
    assert _function_found_late(*c_modules) == 0
