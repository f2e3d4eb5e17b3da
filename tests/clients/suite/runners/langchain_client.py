"""What the runners of langchain-openai share: a chat model, and a question."""

from __future__ import annotations

import agent_tools
from checks import server
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

HERE = server("openvino")
GIVEN = {"model": HERE.model, "base_url": HERE.openai, "api_key": "none", "temperature": 0}
CHAT = ChatOpenAI(**GIVEN, max_tokens=64, max_retries=0, timeout=120)
ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris"
TOOLS = [tool(agent_tools.temperature), tool(agent_tools.add)]
