"""Program of a node other than the leader: this machine's workers of a vLLM engine.

What `cog-triton serve --node-rank` starts, in the Python that has vLLM, once the leader has told it
to. Its arguments are one JSON object; it ends when one of its workers does, or at SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from cog_triton.engines.vllm import compiler_caches, engine_api
from cog_triton.engines.vllm.model_directory import enter_model
from cog_triton.engines.vllm.nodes import network_variables, node_arguments, nodes_of
from cog_triton.engines.vllm.vllm_version import installed_version
from cog_triton.errors import CogTritonError


def main() -> int:
    """Run the workers; returns 1 always, since nobody has asked them to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    given = json.loads(sys.argv[1])
    for name, value in network_variables(given["address"]).items():
        os.environ.setdefault(name, value)
    try:
        model = enter_model(Path(given["engine_dir"]), version := installed_version())
        compiler_caches.begin(given["parameters"], model.arguments, version)
        nodes = nodes_of(model.arguments, given["leader"])
        arguments = node_arguments(model.arguments, nodes, given["rank"], given["leader"])
        engine_api.run_node(arguments, allow_untested=given["allow_untested"])
    except CogTritonError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
