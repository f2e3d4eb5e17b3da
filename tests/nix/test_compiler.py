"""The compiler of runner images makes Python modules, as Triton has it make them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from factory import Factory, run

# What Triton's driver.c relies on: Python.h, the layout of C11, and a library under its full name.
SOURCE = """
#include <Python.h>
#include <dlfcn.h>
#include <stdalign.h>
#include <stddef.h>
#if __STDC_VERSION__ < 201112L
#error "cuda.h aligns nothing before C11"
#endif
typedef struct { PyObject_HEAD; _Alignas(128) char map[128]; } Object;
int driver(void);
static PyObject *answer(PyObject *self, PyObject *args) {
  return Py_BuildValue("ini", driver(), (Py_ssize_t)offsetof(Object, map), (int)sizeof(Object));
}
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, NULL}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "built", NULL, -1, methods};
PyMODINIT_FUNC PyInit_built(void) { return PyModule_Create(&definition); }
"""
PROGRAM = """
import importlib.machinery, importlib.util, subprocess, sys, sysconfig
cc, source, module, libraries = sys.argv[1:]
flags = ["-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", module, "-l:libdriver.so.1"]
flags += [f"-L{libraries}", "-I" + sysconfig.get_paths()["include"]]
subprocess.run([cc, source, *flags], check=True)
loader = importlib.machinery.ExtensionFileLoader("built", module)
built = importlib.util.module_from_spec(importlib.util.spec_from_loader("built", loader))
loader.exec_module(built)
print(built.answer())
"""


def test_a_module_is_built_and_loaded(factory: Factory, tmp_path: Path) -> None:
    compiler = factory.evaluated("import SOURCE/nix/compiler.nix { inherit pkgs; }")
    python = factory.evaluated("pkgs.python312")
    (tmp_path / "built.c").write_text(SOURCE)
    (tmp_path / "driver.c").write_text("int driver(void) { return 42; }")
    library = tmp_path / "libdriver.so.1"
    soname = f"-Wl,-soname,{library.name}"
    run("gcc", "-shared", "-fPIC", soname, f"{tmp_path}/driver.c", "-lm", "-o", str(library))
    arguments = [str(tmp_path / "built.c"), str(tmp_path / "built.so"), str(tmp_path)]
    done = subprocess.run(
        [f"{python}/bin/python3", "-I", "-c", PROGRAM, f"{compiler}/bin/cc", *arguments],
        env={"PATH": "/bin", "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "(42, 128, 256)\n"), done.stderr
