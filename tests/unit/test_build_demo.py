"""Demo build end to end: the real model becomes an engine.tar that answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from openvino_reference import engine_greedy
from test_build_steps import build_engine, gone
from tokenizers import Tokenizer

import cog_triton
from cog_triton.artifact.engine_tar import unpack
from cog_triton.builder.config import load_config
from cog_triton.builder.example_families import OWN
from cog_triton.builder.workspace import Workspace
from cog_triton.system.reaper import descendants

pytestmark = pytest.mark.integration
DEMO = Path(__file__).parents[2] / "configs" / "build" / "smollm2-135m-cpu.yaml"
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def test_demo_engine_answers_and_a_resumed_build_gives_the_same_bytes(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    config, output = load_config(DEMO), tmp_path / "engine.tar"
    one = build_engine(config, Workspace(tmp_path / "w"), output, OWN, lines.append)
    assert any(line.startswith("[quantize] q8_0: ") for line in lines)

    result = unpack(one, tmp_path / "engine")
    assert result.manifest is not None
    assert result.manifest.engine == "openvino"
    assert result.manifest.max_seq_len == 8192
    tokenizer = Tokenizer.from_file(str(tmp_path / "engine" / "tokenizer.json"))
    ids = engine_greedy(tmp_path / "engine", tokenizer.encode(PROMPT).ids, 8)
    assert "The capital of France is Paris." in tokenizer.decode(ids)

    # Killed in every step in turn, as soon as its output begins to appear.
    killed, again = Workspace(tmp_path / "killed"), tmp_path / "again.tar"
    command = [sys.executable, "-m", "cog_triton", "build", str(DEMO)]
    for half in ("checkpoint", "quantized", "engine"):
        interrupted = subprocess.Popen(
            [*command, f"--work-dir={killed.root}", f"--output={again}"],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(cog_triton.__file__).parents[1])},
        )
        while not (killed.of(config) / half).exists():
            assert interrupted.poll() is None
            time.sleep(0.02)
        left = descendants(interrupted.pid)
        assert left
        interrupted.send_signal(signal.SIGKILL)
        interrupted.wait()
        assert all(gone(pid) for pid in left)
        assert not again.exists()
    lines.clear()
    two = build_engine(config, killed, again, OWN, lines.append)
    assert "[convert] already done" in lines
    assert "[quantize] already done" in lines
    assert "[build] already done" not in lines
    assert two.read_bytes() == one.read_bytes()
