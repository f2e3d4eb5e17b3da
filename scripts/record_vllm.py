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
    ("vllm/v1/engine/async_llm.py", "AsyncLLM", ["from_vllm_config", "generate", "add_request",
                                                 "add_lora", "abort", "check_health", "shutdown"]),
    ("vllm/v1/engine/output_processor.py", "RequestOutputCollector", ["__init__", "put", "get",
                                                                      "get_nowait"]),
    ("vllm/v1/engine/output_processor.py", "OutputProcessor",
     ["__init__", "propagate_error", "abort_requests", "add_request", "process_outputs",
      "update_scheduler_stats"]),
    ("vllm/v1/metrics/loggers.py", "StatLoggerBase", ["__init__", "record",
                                                      "log_engine_initialized"]),
    ("vllm/outputs.py", "RequestOutput", ["__init__", "add"]),
    ("vllm/engine/arg_utils.py", "EngineArgs", ["create_engine_config"]),
]  # fmt: skip
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
    record["signatures"] = {
        f"{path.removesuffix('.py').replace('/', '.')}:{cls}.{node.name}": signature(node)
        for path, cls, names in CALLS
        for node in class_of(parse(site / path), cls).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in names
    }
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
