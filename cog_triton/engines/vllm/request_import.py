"""Import of requests: vLLM takes tokens made as output, as if it had preempted the request.

The plugin of vLLM (``plugin/``, an entry point of ``vllm.general_plugins``) that does so is loaded
in EngineCore. Tokens travel in ``extra_args``; they are appended before a grammar is made, which is
fed with them. Penalties, ``min_tokens``, ``max_tokens`` and noise go by output and by place, so
that nothing starts over. What this needs of vLLM, which does not publish it, is recorded by version
and checked at the start; without it, generations go on from prompt and tokens made.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cog_triton.engines.vllm.argument_types import types_of
from cog_triton.engines.vllm.sampling_arguments import MADE

_log = logging.getLogger(__name__)
MOVED = "COG_TRITON_COMPILED_ELSEWHERE"
"""Variable of EngineCore and its workers: what they load was compiled at another path."""
# Inductor measures reductions in several configurations, and keeps the fastest one's name beside
# the kernel's source. A compiled model knows that place by the path it was compiled at (torch 2.14,
# ``CachingAutotuner.filename``): elsewhere the choice is made again, by a measurement that may end
# otherwise, and written to a path that is another user's or cannot be made, which ends EngineCore.
_PARAMETERS = ["inductor_meta", "filename", "configs_hash"]


def find_kernel_choices() -> None:
    """Have torch look below its cache directory of now; does nothing where nothing has moved.

    Raises no error: a torch that does this in another way chooses again, which is a warning.
    """
    if not os.environ.get(MOVED):
        return
    try:
        from torch._inductor.runtime.autotune_cache import AutotuneCache
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        create: Any = AutotuneCache.create
        if (takes := list(inspect.signature(create).parameters)) != _PARAMETERS:
            raise AttributeError(f"AutotuneCache.create takes {takes}")
    except (ImportError, AttributeError, ValueError) as error:
        _log.warning("torch chooses among a sealed engine's kernels again: %s", error)
        return

    def created(inductor_meta: Any, filename: str, configs_hash: str) -> Any:
        return create(inductor_meta, here(filename, cache_dir()), configs_hash)

    AutotuneCache.create = staticmethod(created)


def here(filename: str, root: str) -> str:
    """The path below `root` of a kernel's source: its last directory, and its name."""
    if filename.startswith(root + os.sep):
        return filename
    return str(Path(root, *Path(filename).parts[-2:]))


PLUGIN = "cog_triton_import"
"""Name of the entry point, as VLLM_PLUGINS lists it, and of EngineCore's method that answers."""
_HOOKS = (
    "vllm.v1.engine.core:EngineCore.preprocess_add_request",
    "vllm.v1.request:Request.from_engine_core_request",
    "vllm.v1.request:Request.append_output_token_ids",
    "vllm.v1.structured_output:StructuredOutputManager._create_grammar",
    "vllm.v1.structured_output:StructuredOutputManager._get_constraint_bounds",
)


def unlisted() -> bool:
    """Whether the user lists plugins of vLLM without this one."""
    listed = os.environ.get("VLLM_PLUGINS")
    return listed is not None and PLUGIN not in listed.split(",")


def make_discoverable() -> None:
    """Put the plugin where vLLM's processes find it, in whatever Python and directory they run."""
    directory = str(Path(__file__).with_name("plugin"))
    if directory not in sys.path:  # which processes that are spawned get, too
        sys.path.append(directory)


async def refusal(engine: Any) -> str:
    """Why the loaded AsyncLLM takes no tokens as output; "" if it does."""
    config = engine.vllm_config
    if not getattr(config, "use_v2_model_runner", False):
        return "model runner V1 drops what a request brings"
    if getattr(config, "speculative_config", None) is not None:
        return "with speculative decoding, draws depend on where its steps begin"
    if getattr(config.model_config, "is_diffusion", False):
        return "a diffusion model makes its tokens in no order"
    try:
        return str(await engine.engine_core.call_utility_async(PLUGIN))
    except Exception as error:
        if engine.errored:
            raise
        listed = os.environ.get("VLLM_PLUGINS")
        return f"vLLM has not loaded the plugin {PLUGIN} (VLLM_PLUGINS={listed}): {error}"


def install() -> None:
    """Wrap what EngineCore does with a new request; the plugin's entry point, which never raises.

    Elsewhere, as in workers and where vLLM looks at a model's class, there is nothing to do, but
    for code that was compiled at another path.
    """
    find_kernel_choices()
    module = sys.modules.get("vllm.v1.engine.core")
    core = getattr(module, "EngineCore", None)
    if core is None or hasattr(core, PLUGIN):
        return
    try:
        missing = next(_missing(), "")
        if not missing:
            _wrap()
    except Exception as error:  # noqa: BLE001 - vLLM would not start
        missing = f"{type(error).__name__}: {error}"
    setattr(core, PLUGIN, lambda self: missing)


def written(function: Callable[..., Any]) -> list[str]:
    """Parameters of a function as ``scripts/record_vllm.py`` writes them."""
    names = []
    keyword_only = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            names.append("*")
        optional = parameter.default is not parameter.empty
        mark = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        names.append(mark + parameter.name + "=" * optional)
    return names


def named(name: str) -> Any:
    """The function of a record's name, ``module:class.function``; that of a class method, too."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    return getattr(found, "__func__", found)


def _missing() -> Iterator[str]:
    """What import needs, and this vLLM lacks."""
    import vllm

    types = types_of(vllm.__version__)
    if not types.exact:
        yield f"vLLM {vllm.__version__} is not recorded"
    recorded = types.record["hooks"]
    for name in _HOOKS:
        if name not in recorded:
            yield f"{types.title} has no {name}"
        elif (found := written(named(name))) != recorded[name]:
            yield f"{name} takes {found}"
    if "from_engine_core_request" not in named(_HOOKS[0]).__code__.co_names:
        yield f"{_HOOKS[0]} does not call from_engine_core_request"


def _wrap() -> None:
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    make, compile_grammar = named(_HOOKS[1]), StructuredOutputManager._create_grammar

    def from_engine_core_request(cls: Any, request: Any, block_hasher: Any) -> Any:
        made = _taken(request.sampling_params)
        found = make(cls, request, block_hasher)
        if made:
            found.append_output_token_ids(made)
            # Of its prompt alone: a prefix that is cached may be longer.
            found.prefill_stats = None
        return found

    def create_grammar(self: Any, request: Any) -> Any:
        grammar = compile_grammar(self, request)
        if made := list(request.output_token_ids):
            _feed(self, request, grammar, made)
        return grammar

    Request.from_engine_core_request = classmethod(from_engine_core_request)
    StructuredOutputManager._create_grammar = create_grammar


def _taken(params: Any) -> list[int]:
    """The tokens that a request brings, which no worker is sent once more."""
    given = getattr(params, "extra_args", None) or {}
    if MADE not in given:
        return []
    params.extra_args = {key: value for key, value in given.items() if key != MADE} or None
    return list(given[MADE])


def _feed(manager: Any, request: Any, grammar: Any, made: list[int]) -> None:
    """Feed a new grammar with what was made, or what of it comes after the reasoning."""
    start, _ = manager._get_constraint_bounds(request, made, spec_tokens_committed=True)
    if start > len(made):  # it reasons still
        return
    request.structured_output_request.reasoning_ended = True
    if made[start:] and not grammar.accept_tokens(request.request_id, made[start:]):
        raise ValueError("the grammar refuses what was made before the engine died")
