"""Double of vllm/multimodal/media."""

from vllm.multimodal.media.image import ImageMediaIO as ImageMediaIO
