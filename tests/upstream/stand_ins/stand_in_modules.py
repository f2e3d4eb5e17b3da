"""Stand-ins of TensorRT-LLM's compiled bindings, and of packages that only other paths use.

A .pth file has each Python with these stand-ins import this first. Converting a checkpoint and
building an engine up to the compile import the packages below, and call nothing of them.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

from any_name import AnyModule

BINDINGS = "tensorrt_llm.bindings"
UNUSED = frozenset(
    """ammo chex colored cuda datasets decord diffusers einops evaluate flax graphviz h5py janus
    jax lark mamba_ssm modelopt mpi4py nemo onnx onnx_graphsurgeon openai optimum orbax pandas
    PIL polygraphy pulp recurrentgemma torchvision triton""".split()  # noqa: SIM905
)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last finder: what the environment has comes first."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        compiled = fullname == BINDINGS or fullname.startswith(f"{BINDINGS}.")
        if not compiled and fullname.partition(".")[0] not in UNUSED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AnyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == BINDINGS:
            from bindings_enums import KVCacheType

            module.KVCacheType = KVCacheType  # type: ignore[attr-defined]


def _allow_defaults_of_python_3_10() -> None:
    """Let dataclasses have defaults that cannot be hashed, as those of releases until 0.10 do."""
    dataclass_field = dataclasses._get_field  # type: ignore[attr-defined]

    def get_field(cls: type, name: str, *rest: Any) -> Any:
        kind = type(getattr(cls, name, None))
        if kind.__hash__ is None and kind.__module__.startswith("tensorrt_llm"):
            kind.__hash__ = object.__hash__  # type: ignore[method-assign]
        return dataclass_field(cls, name, *rest)

    dataclasses._get_field = get_field  # type: ignore[attr-defined]


sys.meta_path.append(_Finder())
_allow_defaults_of_python_3_10()
# TensorRT-LLM's own switch: its compiled plugins are not loaded.
os.environ["TRT_LLM_NO_LIB_INIT"] = "1"
