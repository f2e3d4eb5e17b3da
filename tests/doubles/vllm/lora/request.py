"""Double of vllm/lora/request.py."""

from dataclasses import dataclass

from vllm.recorded_versions import IS_0_26, only


@dataclass
@only(IS_0_26, "tensorizer_config_dict")
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
