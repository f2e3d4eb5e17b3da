"""Canary check at start: the engine answers a known prompt as it did when it was built."""

from __future__ import annotations

import logging

from cog_triton.artifact import canary
from cog_triton.engines.base import EngineFamily
from cog_triton.errors import CogTritonError
from cog_triton.serving.generate import TextGenerator

_log = logging.getLogger(__name__)


def check_canary(family: EngineFamily, generator: TextGenerator, *, required: bool) -> None:
    """Send the canary of the engine directory, if it has one; blocks.

    A failure is logged, for another machine's arithmetic may break a near tie otherwise, and
    raised only where it is `required`, as while the engine is to take the place of one that serves.

    Raises:
        CogTritonError: E2112 if the answer differs, or what the request failed with.
    """
    try:
        expected = canary.load(family.directory)
        if expected is None:
            return
        expected.require(generator.greedy_ids(expected.input_ids, len(expected.output_ids)))
    except CogTritonError as error:
        if required:
            raise
        _log.warning("%s", error)
    else:
        _log.info("the canary of %d tokens was answered as built", len(expected.output_ids))
