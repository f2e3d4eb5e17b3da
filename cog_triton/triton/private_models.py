"""Private models: Triton models for our own front end, which the front door does not publish."""

STEP_MODEL = "engine_steps"
ADAPTER_LOADER = "lora_loader"
DRAFT_MODEL, LOOP_MODEL = "tensorrt_llm_draft", "draft_target"
PRIVATE_MODELS = (STEP_MODEL, ADAPTER_LOADER, DRAFT_MODEL, LOOP_MODEL)
