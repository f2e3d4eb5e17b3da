"""Abilities of an engine family: what a request may ask of it beyond text, and what is resumed.

One table for the refusals by name, for ``capabilities`` in /v1/models, and for the documents.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from cog_triton.errors import InvalidArgument
from cog_triton.text.guide import GuideKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Abilities of an engine; by default it generates text, and has none of the others.

    `generation` is whether it answers with text, `embeddings` whether with embeddings.
    `guides` are the kinds of guided decoding, `top_log_probs` is the number of likeliest tokens
    told beside each token, `prompt_log_probs` whether those of the prompt's tokens are, `sampling`
    are those of `ABILITIES` that it heeds, `structural_tags` is whether calls amid text are guided
    from their opening on. `images` is how many a prompt may have; `image_placeholder` stands for
    one in its text (``{}`` is the image's number), None if only the model's chat template knows
    what does.
    """

    generation: bool = True
    embeddings: bool = False
    guides: Set[GuideKind] = frozenset()
    top_log_probs: int = 0
    prompt_log_probs: bool = False
    sampling: Set[str] = frozenset()
    structural_tags: bool = False
    images: int = 0
    image_placeholder: str | None = None

    def require_generation(self) -> None:
        """Raise E1005 if the model makes embeddings alone."""
        if not self.generation:
            raise InvalidArgument(
                "this model makes embeddings, and generates no text; POST /v1/embeddings"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRules:
    """Resumption rules of an engine family; by default what counts output alone is not carried.

    The front end resumes a generation from its prompt and the tokens made so far. An engine takes
    these for a prompt: what counts output alone begins anew, unless it is carried otherwise.

    `frequency_penalty` and `presence_penalty` are ``sequence`` where the engine counts prompt and
    output alike, ``logit_bias`` where a bias is the same, None where it cannot be carried.
    `max_input_len` says whether prompt and tokens made must fit the engine's max_input_len.
    """

    frequency_penalty: Literal["sequence", "logit_bias"] | None = None
    presence_penalty: Literal["sequence"] | None = None
    max_input_len: bool = False
