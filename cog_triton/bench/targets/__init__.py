"""Benchmark targets: one module for each kind of server."""

from __future__ import annotations

from cog_triton.bench.http_client import Client
from cog_triton.bench.options import Options, TargetName
from cog_triton.bench.targets.base import Target
from cog_triton.bench.targets.cog import CogTarget
from cog_triton.bench.targets.openai import OpenAITarget
from cog_triton.bench.targets.triton import TritonTarget

KINDS: dict[TargetName, type[Target]] = {
    TargetName.COG: CogTarget,
    TargetName.TRITON: TritonTarget,
    TargetName.OPENAI: OpenAITarget,
}


def make(options: Options, client: Client) -> Target:
    """Make the target that `options` name."""
    return KINDS[options.target](options, client)
