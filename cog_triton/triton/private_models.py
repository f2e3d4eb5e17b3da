"""Private models: Triton models for our own front end, which the front door does not publish."""

STEP_MODEL = "engine_steps"
ADAPTER_LOADER = "lora_loader"
PRIVATE_MODELS = (STEP_MODEL, ADAPTER_LOADER)
