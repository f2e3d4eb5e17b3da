"""Double of vllm/usage/usage_lib.py."""

from enum import StrEnum


class UsageContext(StrEnum):
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
