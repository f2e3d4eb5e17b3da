"""Names of the request fields that the server knows, to compare with those of released clients."""

from __future__ import annotations

from cog_triton.serving.openai import embeddings, messages_request, responses_request
from cog_triton.serving.openai.requests import ChatRequest, CompletionRequest, known_fields

KNOWN_FIELDS: dict[str, list[str]] = {
    "chat": sorted(known_fields(ChatRequest)),
    "completions": sorted(known_fields(CompletionRequest)),
    "embeddings": sorted(embeddings.EmbeddingsRequest.model_fields),
    # The rest is left to the parser of chats.
    "responses": sorted(responses_request.KNOWN | known_fields(ChatRequest)),
    "messages": sorted(messages_request.KNOWN),
    "tools of messages": sorted(messages_request.KNOWN_OF_TOOLS),
}
