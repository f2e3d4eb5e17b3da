"""Engine manifest, ``cog-triton.json``: contents and target machine, verified before loading.

See docs/build.md, "engine.tar": engine family, model, versions, limits, and size and SHA-256 of
every other file. Schema 2 also has how the engine is to be served, schema 3 what a sealed engine
has; each is written only where there is something to say about that, so that older versions read
all other engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    model_validator,
)

from cog_triton.artifact.engine_config import TENSORRT_LLM
from cog_triton.artifact.seal import Seal, SealName, Variable
from cog_triton.errors import EngineCorrupt, EngineIncompatible
from cog_triton.system.printable import first_problem, printable, shortened

MANIFEST_NAME = "cog-triton.json"
BUILD_CONFIG = "build_config.yaml"
"""The build config, as it was run, among the engine's files."""
MAX_TEXT = 16 << 20
"""Most bytes of a manifest, or of an engine's config.json."""
SEALED_ENGINE = "vllm"
"""The family whose engines may be sealed."""
_MOST_NAME, _MOST_PART = 1024, 255
# Keys that schema 1 does not have: since which one, and for which families.
_LATER = {
    "runtime": (2, (TENSORRT_LLM,)),
    "lora_adapters": (2, (TENSORRT_LLM, SEALED_ENGINE)),
    **dict.fromkeys(("seals", "variables", "weights", "seal_required"), (3, (SEALED_ENGINE,))),
}
AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
"""Name of a packed adapter, which is also that of its directory."""


def _below(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
        raise ValueError("must be the name of a file below the engine's directory")
    if max(len(part.encode()) for part in parts) > _MOST_PART or len(name) > _MOST_NAME:
        raise ValueError(
            f"must have {_MOST_NAME} characters at most, and {_MOST_PART} bytes a part"
        )
    return name


FileName = Annotated[str, AfterValidator(_below)]
"""Name of a file, with slashes, that stays below the directory it is joined to."""


class FileEntry(BaseModel):
    """Size in bytes and hex digest of a file of the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class File(NamedTuple):
    """Size in bytes, and SHA-256 in hex if it is known, of a file as it was found."""

    size: int
    sha256: str | None = None


class AdapterEntry(BaseModel):
    """LoRA adapter in the engine's ``lora/NAME``: where it came from, and what it is.

    `source` is without secrets, `revision` by which the same can be had again, and `base_model`
    what it was trained on, by its own config.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: str
    revision: str | None = None
    rank: int = Field(ge=1)
    base_model: str | None = None


class WeightsReference(BaseModel):
    """Weights that are fetched when the engine is served: where they are, and each file of them.

    `source`, `revision` and `tar_url` are as a build config has them, without secrets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: str
    revision: str | None = None
    tar_url: str | None = None
    files: dict[FileName, FileEntry] = Field(min_length=1)


class Manifest(BaseModel):
    """Manifest; on CPU `sm` is empty and `gpu_name` None; lengths are in tokens.

    `runtime` are settings of the engine's family by name, defaults of a server. Schema 1 has
    neither them nor `lora_adapters`. Schema 3 is of sealed engines: their `seals` by name, the
    environment `variables` that they are started with, their `weights` if these are not packed, and
    whether an engine that no seal fits is refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_: Literal[1, 2, 3] = Field(default=1, alias="schema")
    engine: str
    model_id: str
    revision: str | None = None
    config_sha256: str | None = None
    sm: list[int] = []
    gpu_name: str | None = None
    versions: dict[str, str]
    world_size: int = Field(default=1, ge=1)
    max_input_len: int = Field(ge=1)
    max_seq_len: int = Field(ge=1)
    max_batch_size: int = Field(ge=1)
    runtime: dict[str, JsonValue] = {}
    lora_adapters: dict[AdapterName, AdapterEntry] = {}
    seals: dict[SealName, Seal] = {}
    variables: dict[Variable, str] = {}
    weights: WeightsReference | None = None
    seal_required: bool = False
    files: dict[FileName, FileEntry]

    @model_validator(mode="after")
    def _schema_has_the_keys(self) -> Self:
        for key, (schema, engines) in _LATER.items():
            if getattr(self, key) and self.schema_ < schema:
                raise ValueError(f"{key} needs schema {schema}")
            if getattr(self, key) and self.engine not in engines:
                raise ValueError(f"{key} is for engines of {' and '.join(engines)}")
        if self.weights and (both := self.weights.files.keys() & {*self.files, MANIFEST_NAME}):
            raise ValueError(f"weights: {shortened(min(both))} is a file of the engine, too")
        return self

    def to_json(self) -> str:
        """Text of cog-triton.json; equal for equal manifests."""
        left_out = {key for key in _LATER if not getattr(self, key)}
        return self.model_dump_json(by_alias=True, indent=2, exclude=left_out) + "\n"


def adapter_directory(name: str) -> str:
    """Directory of a packed adapter, from the engine's."""
    return f"lora/{name}"


def load(engine_dir: Path) -> Manifest | None:
    """Load the manifest of an engine directory; None if it has none.

    Raises:
        EngineCorrupt: it is there but unreadable or of a later schema.
    """
    path = engine_dir / MANIFEST_NAME
    try:
        with path.open("rb") as file:
            text = file.read(MAX_TEXT + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EngineCorrupt(f"{path}: cannot be read: {error.strerror}") from error
    return parse(text, str(path))


def parse(text: bytes, origin: str) -> Manifest:
    """Parse the bytes of cog-triton.json; `origin` names them in errors.

    Raises:
        EngineCorrupt: names the key, its value and the rule.
        EngineIncompatible: it has a draft engine beside it, as earlier versions packed them.
    """
    if len(text) > MAX_TEXT:
        raise EngineCorrupt(f"{origin}: has over {MAX_TEXT} bytes")
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["loc"] == ("draft",):
            raise EngineIncompatible(
                f"{origin}: draft: an engine with a draft engine beside it is served no more: build"
                " it without draft, or serve its model by vLLM with a speculative_config"
            ) from error
        problem = first_problem(error)
        if first["loc"] == ("schema",):
            rule = "must be 1, 2 or 3; a later version of cog-triton wrote it, and reads it"
            problem = f"schema: {shortened(first['input'])}: {rule}"
        raise EngineCorrupt(f"{origin}: {problem}") from error


def verify(engine_dir: Path, manifest: Manifest) -> None:
    """Verify the files of `engine_dir` against `manifest` by their sizes.

    Files that the manifest does not name are allowed: engines keep caches beside themselves.

    Raises:
        EngineCorrupt: a file is missing or differs; names it and both sizes.
    """
    for name, entry in manifest.files.items():
        path = engine_dir / name
        if not path.is_file():
            raise EngineCorrupt(f"{engine_dir}: {printable(name)} is in the manifest but missing")
        check_entry(name, entry, path.stat().st_size, None)


def check_entry(name: str, entry: FileEntry, size: int, sha256: str | None) -> None:
    """Raise EngineCorrupt unless `size` and, where given, `sha256` are the entry's."""
    shown = printable(name)
    if size != entry.size:
        raise EngineCorrupt(f"{shown} has {size} bytes, the manifest says {entry.size}")
    if sha256 is not None and sha256 != entry.sha256:
        raise EngineCorrupt(f"{shown} has sha256 {sha256}, the manifest says {entry.sha256}")


def differences(manifest: Manifest, held: Mapping[str, FileEntry | File]) -> list[str]:
    """Describe each file that is missing from `held` or differs from `manifest`."""
    found = []
    for name, entry in manifest.files.items():
        try:
            if name not in held:
                raise EngineCorrupt(f"{printable(name)} is in the manifest but missing")
            check_entry(name, entry, held[name].size, held[name].sha256)
        except EngineCorrupt as error:
            found.append(error.detail)
    return found


def unlisted(manifest: Manifest, held: Iterable[str]) -> list[str]:
    """Names of `held` that are not in `manifest`, sorted; the manifest's own is left out."""
    return sorted(set(held) - manifest.files.keys() - {MANIFEST_NAME})


def files_of(directory: Path) -> dict[str, Path]:
    """Every regular file below `directory`, by its relative POSIX name, sorted by name."""
    found = {p.relative_to(directory).as_posix(): p for p in directory.rglob("*") if p.is_file()}
    return dict(sorted(found.items()))


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
