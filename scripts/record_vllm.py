"""Record of vLLM's interface as far as we use it, from its source, without importing it.

    python scripts/record_vllm.py SITE > cog_triton/engines/vllm/argument_types_0_33.json

SITE is the directory that holds ``vllm``: a checkout with a ``vllm/_version.py``, or an unpacked
wheel. One record a minor version. Compare it with the last one:
`tests/unit/test_vllm_double.py` then says what changed for us.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path

CLASSES = {
    "engine_args": [
        ("vllm/engine/arg_utils.py", name) for name in ("EngineArgs", "AsyncEngineArgs")
    ],
    "sampling_params": [("vllm/sampling_params.py", "SamplingParams")],
    "structured_outputs": [("vllm/sampling_params.py", "StructuredOutputsParams")],
    "repetition_detection": [("vllm/sampling_params.py", "RepetitionDetectionParams")],
    "lora_request": [("vllm/lora/request.py", "LoRARequest")],
    "completion_output": [("vllm/outputs.py", "CompletionOutput")],
}
CALLS = [
    ("vllm/v1/engine/async_llm.py", "AsyncLLM", ["from_vllm_config", "generate", "encode",
                                                 "add_request", "add_lora", "abort", "check_health",
                                                 "sleep", "wake_up", "is_sleeping", "shutdown"]),
    ("vllm/v1/engine/output_processor.py", "RequestOutputCollector", ["__init__", "put", "get",
                                                                      "get_nowait"]),
    ("vllm/v1/engine/output_processor.py", "OutputProcessor",
     ["__init__", "propagate_error", "abort_requests", "add_request", "process_outputs",
      "update_scheduler_stats"]),
    ("vllm/v1/metrics/loggers.py", "StatLoggerBase", ["__init__", "record",
                                                      "log_engine_initialized"]),
    ("vllm/outputs.py", "RequestOutput", ["__init__", "add"]),
    ("vllm/outputs.py", "PoolingRequestOutput", ["__init__"]),
    ("vllm/outputs.py", "EmbeddingRequestOutput", ["from_base"]),
    ("vllm/outputs.py", "EmbeddingOutput", ["from_base"]),
    ("vllm/engine/arg_utils.py", "EngineArgs", ["create_engine_config"]),
    ("vllm/v1/executor/multiproc_executor.py", "MultiprocExecutor",
     ["__init__", "start_worker_monitor"]),
    ("vllm/renderers/base.py", "BaseRenderer", ["render_cmpl_async"]),
    ("vllm/multimodal/media/image.py", "ImageMediaIO", ["load_bytes"]),
]  # fmt: skip
HOOKS = [
    ("vllm/v1/engine/core.py", "EngineCore", ["preprocess_add_request"]),
    ("vllm/v1/request.py", "Request", ["from_engine_core_request", "append_output_token_ids"]),
    ("vllm/v1/structured_output/__init__.py", "StructuredOutputManager",
     ["_create_grammar", "_get_constraint_bounds"]),
]  # fmt: skip
REGISTRY = "vllm/model_executor/models/registry.py"
EXCEPTIONS = ["vllm/exceptions.py", "vllm/v1/engine/exceptions.py"]
SIMPLE = {"int": "int", "float": "float", "bool": "bool", "str": "str", "None": "null"}
SIMPLE |= {"list": "list", "set": "list", "tuple": "list", "dict": "dict", "Any": "any"}
SIMPLE |= {"np.ndarray": "list"}
# Enumerations that are written by name, and those that are numbers.
SIMPLE |= {"AttentionBackendEnum": "str", "MambaBackendEnum": "str", "OptimizationLevel": "int"}


def parse(path: Path) -> ast.Module:
    """The syntax tree of one source file."""
    return ast.parse(path.read_text("utf-8"))


def aliases(site: Path) -> dict[str, ast.expr]:
    """Names that vLLM gives to types at the top of its modules."""
    found: dict[str, ast.expr] = {}
    roots = ["vllm/config", "vllm/engine", "vllm/model_executor/layers/quantization"]
    for path in sorted(path for root in roots for path in (site / root).glob("*.py")):
        for node in parse(path).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            is_type = re.match(
                r"(Literal|Union|str|dict|None)\b.*[\[|]|str$", ast.unparse(node.value)
            )
            if isinstance(target, ast.Name) and is_type:
                found[target.id] = node.value
    return found


def kinds(node: ast.expr, known: dict[str, ast.expr]) -> list[str]:
    """JSON types that an annotation allows; choices are marked with ``=``."""
    if isinstance(node, ast.BinOp):
        return [*kinds(node.left, known), *kinds(node.right, known)]
    if isinstance(node, ast.Constant):
        return kinds(ast.parse(node.value, mode="eval").body, known) if node.value else ["null"]
    if isinstance(node, ast.Subscript):
        name = ast.unparse(node.value)
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Literal":
            return [kind for item in items for kind in choices(item, known)]
        if name == "Annotated":
            return kinds(items[0], known)
        return [SIMPLE[name]] if name in SIMPLE else []
    name = ast.unparse(node)
    if name in SIMPLE:
        return [SIMPLE[name]]
    if name in known:
        return kinds(known[name], known)
    return ["dict"] if name.endswith(("Config", "Params", "Args", "Overrides")) else []


def choices(item: ast.expr, known: dict[str, ast.expr]) -> list[str]:
    """Values that one part of a ``Literal`` allows."""
    if isinstance(item, ast.Constant):
        return [f"={item.value}"]
    return kinds(item, known)


def fields(site: Path, path: str, name: str, known: dict[str, ast.expr]) -> dict[str, list[str]]:
    """The annotated fields of a class that are meant for others."""
    body = class_of(parse(site / path), name).body
    found: dict[str, list[str]] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            allowed = set(kinds(node.annotation, known))
            if "str" in allowed:
                allowed = {kind for kind in allowed if kind[0] != "="}
            if not node.target.id.startswith("_"):
                found[node.target.id] = sorted(allowed, key=lambda kind: (kind[0] == "=", kind))
    return found


def class_of(tree: ast.Module, name: str) -> ast.ClassDef:
    """A class by its name."""
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Parameter names as written, ``*`` before those that need their keyword, ``=`` if optional."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    optional = len(plain) - len(arguments.defaults)
    names = [a.arg + "=" * (i >= optional) for i, a in enumerate(plain)]
    if arguments.vararg or arguments.kwonlyargs:
        names.append("*" + (arguments.vararg.arg if arguments.vararg else ""))
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    names += [a.arg + "=" * (default is not None) for a, default in defaults]
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def image_models(site: Path) -> dict[str, str | None]:
    """Architectures that take images, with the text that stands for one in a prompt.

    ``{}`` is the image's number, from 1; None where vLLM names no text.
    """
    table = next(
        node.value
        for node in parse(site / REGISTRY).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MULTIMODAL_MODELS"
    )
    found: dict[str, str | None] = {}
    for name, (module, cls) in ast.literal_eval(table).items():
        dotted = module if "." in module else f"vllm.model_executor.models.{module}"
        sources = _sources(site, dotted)
        named = _method(site, dotted, cls, "get_placeholder_str")
        if named is None and len(sources) > 1:  # a package of one model for several vendors
            named = next(
                (n for tree in sources for n in _methods(tree, "get_placeholder_str")), None
            )
        limits = [node for tree in sources for node in _methods(tree, "get_supported_mm_limits")]
        if named is not None and "'image" in ast.unparse(named):
            found[name] = _placeholder(named, [*sources, *_sources(site, _home(named))])
        elif any("'image'" in ast.unparse(node) for node in limits):
            found[name] = None
    return found


_HOMES: dict[int, str] = {}


def _home(method: ast.FunctionDef) -> str:
    """The module that a method was found in."""
    return _HOMES.get(id(method), "")


def _methods(tree: ast.Module, name: str) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]


def _sources(site: Path, module: str) -> list[ast.Module]:
    """A module, or those of a package."""
    path = site / module.replace(".", "/")
    if path.is_dir() and module:
        return [_parsed(file) for file in sorted(path.rglob("*.py"))]
    return [_parsed(path.with_suffix(".py"))] if path.with_suffix(".py").is_file() else []


@cache
def _parsed(path: Path) -> ast.Module:
    return parse(path)


def _method(site: Path, module: str, cls: str, name: str, depth: int = 8) -> ast.FunctionDef | None:
    """A method of a class, its own or inherited, through what modules import from each other."""
    path = site / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not depth or not file.is_file():
        return None
    for node in _parsed(file).body:
        if isinstance(node, ast.ClassDef) and node.name == cls:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == name:
                    _HOMES[id(item)] = module
                    return item
            bases = (ast.unparse(base).partition("[")[0] for base in node.bases)
            tried = (_method(site, module, base, name, depth - 1) for base in bases)
            return next(filter(None, tried), None)
        if isinstance(node, ast.ImportFrom) and node.module:
            for item in node.names:
                if (item.asname or item.name) == cls:
                    parts = [*module.split("."), ""] if path.is_dir() else module.split(".")
                    own = ".".join([*parts[: -node.level], ""]) if node.level else ""
                    return _method(site, own + node.module, item.name, name, depth - 1)
    return None


def _placeholder(method: ast.FunctionDef, sources: list[ast.Module]) -> str | None:
    """What the method returns for an image, if that is a text or one of the module's names."""
    for node in ast.walk(method):
        if not (isinstance(node, ast.If) and "'image" in ast.unparse(node.test)):
            continue
        for inner in node.body:
            if isinstance(inner, ast.Return) and (text := _text(inner.value, sources)):
                return text
    return None


def _text(node: ast.expr | None, sources: list[ast.Module]) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [
            "{}"
            if isinstance(part, ast.FormattedValue) and ast.unparse(part.value) == "i"
            else _text(part.value if isinstance(part, ast.FormattedValue) else part, sources)
            for part in node.values
        ]
        return None if None in parts else "".join(filter(None, parts))
    if isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        for item in (item for tree in sources for item in ast.walk(tree)):
            if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == name:
                return _text(item.value, sources)
    return None


def main() -> None:
    """Print the record as JSON."""
    site = Path(sys.argv[1])
    version_source = (site / "vllm/_version.py").read_text("utf-8")
    known = aliases(site)
    record: dict[str, object] = {
        "source": {
            "package": "vllm",
            "version": re.findall(r"version = '([^']+)'", version_source)[0],
            "commit": re.findall(r"commit_id = 'g([^']+)'", version_source)[0],
        }
    }
    for section, sources in CLASSES.items():
        found: dict[str, list[str]] = {}
        for path, name in sources:
            found |= fields(site, path, name, known)
        record[section] = found
    for section, calls in (("signatures", CALLS), ("hooks", HOOKS)):
        record[section] = {
            f"{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
            f":{cls}.{node.name}": signature(node)
            for path, cls, names in calls
            for node in class_of(parse(site / path), cls).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in names
        }
    record["image_models"] = image_models(site)
    record["exceptions"] = {
        f"{path.removesuffix('.py').replace('/', '.')}:{node.name}": list(
            map(ast.unparse, node.bases)
        )
        for path in EXCEPTIONS
        for node in parse(site / path).body
        if isinstance(node, ast.ClassDef)
    }
    text = json.dumps(record, indent=1)
    print(re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text))


if __name__ == "__main__":
    main()
