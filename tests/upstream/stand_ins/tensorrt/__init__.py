"""Stand-in of TensorRT: networks have inputs and no layers, and nothing is compiled.

TensorRT infers shapes as a network is defined, and TensorRT-LLM's layers ask for them. So the
definition of the network is left out, with the compile: calling a model returns at once. All
around it runs: command line, checkpoint into the model's parameters with its own checks of their
shapes, inputs with their profiles, config and files of the engine.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Sequence
from typing import Any

import one_gpu
from any_name import any_name

__version__ = "10.4.0"


class DataType(enum.Enum):
    """Types of tensors."""

    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9


float32 = DataType.FLOAT
float16 = DataType.HALF
bfloat16 = DataType.BF16
fp8 = DataType.FP8
int4 = DataType.INT4
int8 = DataType.INT8
int32 = DataType.INT32
int64 = DataType.INT64
uint8 = DataType.UINT8
bool = DataType.BOOL  # noqa: A001


class NetworkDefinitionCreationFlag(enum.IntEnum):
    """Bits of a network's flags."""

    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


class Logger:
    """Logger that writes to stderr."""

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)
    Severity = int

    def __init__(self, min_severity: int = WARNING) -> None:
        self.min_severity = min_severity

    def log(self, severity: int, message: str) -> None:
        """Write `message` unless it is of less than the least severity."""
        if severity <= self.min_severity:
            print(message, file=sys.stderr)


class ITensor:
    """An input of a network; Python code sets its attributes."""

    def __init__(self, name: str, dtype: DataType, shape: Sequence[int]) -> None:
        self.name, self.dtype, self.shape = name, dtype, tuple(shape)
        self.dimensions: dict[int, str] = {}

    def set_dimension_name(self, index: int, name: str) -> None:
        """Name a dimension."""
        self.dimensions[index] = name


class IOptimizationProfile:
    """Least, usual and greatest shapes of inputs."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[list[int], list[int], list[int]]] = {}

    def set_shape(self, name: str, least: list[int], usual: list[int], most: list[int]) -> None:
        """Set the shapes of the input `name`."""
        self.shapes[name] = (list(least), list(usual), list(most))

    set_shape_input = set_shape


class INetworkDefinition:
    """A network of inputs."""

    name = "network"
    num_layers = 0
    num_outputs = 0

    def __init__(self, builder: Builder, flags: int) -> None:
        self.builder, self.flags = builder, flags
        self.inputs: list[ITensor] = []

    @property
    def num_inputs(self) -> int:
        """How many inputs were added."""
        return len(self.inputs)

    def get_input(self, index: int) -> ITensor:
        """The input that was added as number `index`."""
        return self.inputs[index]

    def get_flag(self, flag: NetworkDefinitionCreationFlag) -> Any:
        """Whether it was made with `flag`."""
        return self.flags >> flag & 1 == 1

    def add_input(self, name: str, dtype: DataType, shape: Sequence[int]) -> ITensor:
        """Add an input."""
        self.inputs.append(ITensor(name, dtype, shape))
        return self.inputs[-1]

    def set_weights_name(self, weights: Any, name: str) -> Any:
        """Take the name of weights that no layer has."""
        return True


class ITimingCache:
    """Timings of kernels: none."""

    def serialize(self) -> memoryview:
        """An empty cache."""
        return memoryview(b"")


class IBuilderConfig:
    """Flags, profiles and what else is set."""

    def __init__(self) -> None:
        self.flags = 0
        self.profiles: list[IOptimizationProfile] = []

    @property
    def num_optimization_profiles(self) -> int:
        """How many profiles were added."""
        return len(self.profiles)

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        """Add a profile; its number."""
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def set_flag(self, flag: Any) -> None:
        """Take a flag of the compile."""

    def set_preview_feature(self, feature: Any, on: Any) -> None:
        """Take a setting of the compile."""

    def create_timing_cache(self, data: bytes) -> ITimingCache:
        """A timing cache, whatever `data` has."""
        return ITimingCache()

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: Any) -> Any:
        """Take a timing cache."""
        return True

    def get_timing_cache(self) -> ITimingCache:
        """A timing cache."""
        return ITimingCache()


class Builder:
    """Builder of networks."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def create_builder_config(self) -> IBuilderConfig:
        """A config without profiles."""
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        """A profile without shapes."""
        return IOptimizationProfile()

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        """A network; from now on models add no layers to one."""
        from tensorrt_llm.models.modeling_utils import PretrainedModel

        PretrainedModel.__call__ = lambda *_, **__: None
        return INetworkDefinition(self, flags)

    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> bytes:
        """Inputs and profiles as JSON, in the place of a compiled plan."""
        inputs = {t.name: [t.dtype.name, *t.shape] for t in network.inputs}
        profiles = [profile.shapes for profile in config.profiles]
        return json.dumps({"not compiled": inputs, "profiles": profiles}).encode()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"{__name__}.{name}")
    made = any_name(name, __name__)
    globals()[name] = made
    return made


one_gpu.pretend()
