"""Messages of the vLLM host: consecutive text events coalesce without loss."""

from __future__ import annotations

from dataclasses import replace

from cog_triton.engines.engine_client import coalesce_events
from cog_triton.engines.vllm.host_messages import TextEvent


def test_alternating_outputs_are_coalesced_by_index() -> None:
    """Streaming with n above 1, real vLLM tells of one output at a time."""
    nan = float("nan")
    first = TextEvent(
        texts=["a", ""],
        finish_reasons=["stop", None],
        cumulative_logprobs=[-1.0, nan],
        logprobs=['[{"97": {}}]', "null"],
        output_token_counts=[1, 0],
        input_token_count=3,
    )
    empty = replace(first, texts=["", ""], finish_reasons=[None, None], logprobs=["[]", "null"],
                    cumulative_logprobs=[nan, nan], output_token_counts=[0, 0])  # fmt: skip
    other = replace(first, texts=["", "b"], finish_reasons=[None, None],
                    cumulative_logprobs=[nan, -2.0], output_token_counts=[0, 2],
                    logprobs=["null", '[{"98": {}}, {"99": {}}]'])  # fmt: skip
    last = replace(other, texts=["", "c"], finish_reasons=[None, "length"], finish="stop")
    coalesced = TextEvent.coalesce([first, empty, other, last])
    assert coalesced == TextEvent(
        texts=["a", "bc"],
        finish_reasons=["stop", "length"],
        cumulative_logprobs=[-1.0, -2.0],
        logprobs=['[{"97": {}}]', '[{"98": {}}, {"99": {}}, {"98": {}}, {"99": {}}]'],
        output_token_counts=[1, 4],
        input_token_count=3,
        finish="stop",
    )
    assert TextEvent.coalesce([empty, empty]).logprobs == ["[]", "null"]


def test_text_of_the_cancelled_event_is_kept() -> None:
    """A client gets an error for it, and no output beside."""
    event = TextEvent(
        texts=["a"],
        finish_reasons=[None],
        cumulative_logprobs=[0.0],
        logprobs=["null"],
        output_token_counts=[1],
        input_token_count=3,
    )
    cancelled = replace(event, texts=[""], finish_reasons=["abort"], finish="cancelled")
    events = [(1, event), (1, event), (1, cancelled)]
    assert [(e.texts, e.finish) for _, e in coalesce_events(events)] == [
        (["aa"], None),
        ([""], "cancelled"),
    ]
