"""What the runners of openai share: a client, and a question."""

from __future__ import annotations

import openai
from checks import server

HERE = server("openvino")
MODEL = HERE.model
CLIENT = openai.OpenAI(base_url=HERE.openai, api_key="none", max_retries=0, timeout=120)
ASK = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris"
