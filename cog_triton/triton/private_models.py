"""Private models: Triton models for our own front end, which the front door does not publish."""

STEP_MODEL = "engine_steps"
