"""Tuning of a process: garbage collection, malloc."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import threading
from cog_triton.engines.mock import word_tokenizer
from cog_triton.system import process_tuning
from cog_triton.text.prompt_encoder import PromptEncoder
from cog_triton.text.tokenizer import EngineTokenizer

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

process_tuning.limit_arenas()
encoder = PromptEncoder(EngineTokenizer(word_tokenizer.make()), 100_000)
text = "tell me about the sea " * 12_000
encoder.encode(text[:1000])
before = resident()
for _ in range(6):
    def encode():
        encoder.encode(text)
    threads = [threading.Thread(target=encode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(resident() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_memory_of_long_prompts_on_many_threads_goes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 16 << 10
