"""NVIDIA Dynamo's front end and mocker as a server for benchmarks, without etcd and NATS."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from _servers import Server, spawned

from cog_triton.engines.mock import mock_directory
from cog_triton.system import reaper
from cog_triton.system.ports import free_ports

TOOLS = Path(__file__).parents[1] / ".work" / "tools"
"""Where scripts/setup-tools puts Dynamo."""
_START_S = 60
_POLL_S = 0.05
_LOOPBACK = "127.0.0.1"
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
"""What the mocker wants to know of a model, beside sizes: it computes nothing."""


@contextmanager
def dynamo_server(tps: float = 0) -> Iterator[Server]:
    """``dynamo.frontend`` and ``dynamo.mocker`` of .work/tools, with our mock's tokenizer.

    Every running stream gets a token each 1 / `tps` seconds, all at once, and without `tps` as
    fast as the mocker can. Raises SystemExit with the end of their logs if they do not start.
    """
    (port,) = free_ports(1)
    url = f"http://{_LOOPBACK}:{port}"
    with tempfile.TemporaryDirectory(prefix="cog-triton-dynamo-") as name:
        scratch = Path(name)
        timing = {"type": "fixed", "prefill_ms": 0, "decode_ms": 1000 / tps if tps else 0}
        engine = scratch / "engine.json"
        engine.write_text(json.dumps({"engine": {"timing_model": timing}}))
        model = make_model(scratch / "models")
        module = [sys.executable, "-m"]
        front = [*module, "dynamo.frontend", f"--http-host={_LOOPBACK}", f"--http-port={port}"]
        mocker = [*module, "dynamo.mocker", f"--model-path={model}", "--model-name=mock"]
        mocker.append(f"--extra-engine-args={engine}")
        own = environment(scratch)
        logs = [scratch / "frontend.log", scratch / "mocker.log"]
        started = time.monotonic()
        with spawned(front, own, logs[0]) as first, spawned(mocker, own, logs[1]) as second:
            _until_ready([first, second], url, logs)
            pid, ready = first.process.pid, time.monotonic()
            beside = (second.process.pid,)
            yield Server(pid, logs[0], url, url, url, url, started, ready, beside)


def make_model(directory: Path) -> Path:
    """Our mock's engine directory below `directory`, with the config.json of a small model."""
    model = mock_directory.make_engine(directory)
    mock = mock_directory.read_model(model)
    own = {
        "vocab_size": mock.vocab_size,
        "max_position_embeddings": mock.max_seq_len,
        "eos_token_id": mock.eos_ids[0],
        "bos_token_id": mock.eos_ids[0],
    }
    (model / "config.json").write_text(json.dumps({**_CONFIG, **own}))
    return model


def environment(scratch: Path) -> dict[str, str]:
    """Variables that keep discovery in files, traffic on loopback, and caches in `scratch`.

    Events of the KV cache, which this router does not use, would be published on every address
    of the machine: they go to a broker that is not there.
    """
    return {
        "HOME": str(scratch),
        "PYTHONPATH": str(TOOLS),
        "HF_HUB_OFFLINE": "1",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(scratch / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_TCP_RPC_HOST": _LOOPBACK,
        "DYN_TCP_RESPONSE_STREAM_HOST": _LOOPBACK,
        "DYN_HTTP_RPC_HOST": _LOOPBACK,
        "DYN_EVENT_PLANE_HOST": _LOOPBACK,
        "DYN_ZMQ_BROKER_URL": f"xsub=tcp://{_LOOPBACK}:9 , xpub=tcp://{_LOOPBACK}:9",
    }


def _until_ready(processes: list[reaper.Reaped], url: str, logs: list[Path]) -> None:
    deadline = time.monotonic() + _START_S
    while all(each.poll() is None for each in processes) and time.monotonic() < deadline:
        try:
            with urlopen(f"{url}/v1/models", timeout=5) as answer:
                if json.load(answer)["data"]:
                    return
        except OSError:
            pass
        time.sleep(_POLL_S)
    said = "\n".join(log.read_text("utf-8", "replace")[-2000:] for log in logs)
    raise SystemExit(f"Dynamo did not become ready:\n{said}")
