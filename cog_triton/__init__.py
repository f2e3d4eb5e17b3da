"""From a YAML file to a served LLM: engine builds, and NVIDIA Triton behind Replicate's Cog."""

__version__ = "0.4.1"
