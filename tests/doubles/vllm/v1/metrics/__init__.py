"""Double of vLLM's package of this name."""
