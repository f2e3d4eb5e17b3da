"""LoRA adapters by name, loaded at start or at run time, as engines get them, and their use.

What was checked is what an engine loads: an adapter's two files are copied into the run directory,
where nobody else writes, and nothing else of it is.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path

from cog_triton.artifact import lora_adapter
from cog_triton.artifact.lora_adapter import LoRAAdapter, LoRALimits
from cog_triton.download.adapter_source import fetch_adapter
from cog_triton.engines.adapter_registry import AdapterRegistry, RegisteredAdapter
from cog_triton.errors import (
    CogTritonError,
    EngineCorrupt,
    InvalidArgument,
    ModelUnavailable,
    NotFound,
    Overloaded,
    nearest,
)
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.settings import Settings
from cog_triton.system.atomic_write import disk_full_errors, megabytes

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][\w.:/-]{0,127}", re.ASCII)
_CHUNK = 1 << 20
_MOST_LOADED = 256


class AdapterStore:
    """The adapters of one server, and of an earlier one with the same engine; thread-safe."""

    def __init__(self, settings: Settings, limits: LoRALimits, run_dir: Path) -> None:
        """`limits` are what the engine takes."""
        self.limits = limits
        self.registry = AdapterRegistry(run_dir / "adapters" / "registry.json")
        self._settings = settings
        self._files = run_dir / "adapters"
        self._lock = threading.Lock()
        self._adapters: dict[str, RegisteredAdapter] = {}
        self._names_used: set[str] = set()
        self._number = 0
        self._follows = self.registry.path.exists()
        if self._follows:
            # The engine may have others of the earlier server, by any name and low number.
            self._adapters, self._number = self.registry.adapters(), secrets.randbits(30)
        else:
            self._files.mkdir(exist_ok=True)
            self.registry.write(())

    def adapters(self) -> Mapping[str, RegisteredAdapter]:
        """The loaded adapters by name."""
        return self._adapters

    def fetch(self, name: str, source: str, base: Path, token: str | None = None) -> None:
        """Load an adapter that the operator names; see `fetch_adapter`.

        What an earlier server has loaded stays.
        """
        if self._follows and name in self._adapters:
            return
        with _naming(name):
            store = self._settings.work_dir / "models"
            limit = self._settings.max_lora_bytes
            found = fetch_adapter(source, base, store, limit, _log.info, token=token)
            self.load(name, found.path)

    def load_requested(self, name: str, path: str, *, replace: bool) -> RegisteredAdapter:
        """Load an adapter that a client names; raises E1009 or E1005 for a path out of LORA_DIR."""
        root = self._settings.lora_dir
        if root is None:
            raise NotFound("adapters are loaded at run time where LORA_DIR is set, and it is not")
        # Resolved, so that neither .. nor a link leads out.
        root = root.resolve()
        try:
            directory = (root / path).resolve()
            inside = directory.is_relative_to(root) and directory.is_dir()
        except (OSError, ValueError, RuntimeError):
            inside = False
        if not inside:
            raise InvalidArgument(f"lora_path={path[:200]!r}: no such directory below LORA_DIR")
        with _naming(name):
            return self.load(name, directory, root, replace=replace)

    def load(
        self,
        name: str,
        directory: Path,
        root: Path | None = None,
        *,
        replace: bool = False,
    ) -> RegisteredAdapter:
        """Check an adapter, copy it, and let requests name it.

        Raises:
            InvalidArgument: the name is none, or is taken and not to be replaced.
            ModelUnavailable: it is larger than MAX_LORA_BYTES.
            EngineCorrupt, EngineIncompatible: as `read_adapter` and `check_adapter`.
            Overloaded: as many are loaded as may be.
        """
        if not _NAME.fullmatch(name):
            raise InvalidArgument(
                f"lora_name={name[:80]!r}: must begin with a letter or a digit, and be of these"
                " and . _ - : / only, at most 128"
            )
        with self._lock:
            self._require_free(name, replace=replace)
            adapter, copied = self._copy(directory, root)
            self._number += 1
            # "#" is in no name.
            unused = not self._follows and name not in self._names_used
            engine_name = name if unused else f"{name}#{self._number}"
            found = RegisteredAdapter(name, self._number, copied, adapter.rank, engine_name)
            self._names_used.add(name)
            self._publish({**self._adapters, name: found})
        _log.info(
            "LoRA adapter %r of rank %d, trained on %r", name, adapter.rank, adapter.base_model
        )
        return found

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that have it already keep it. Raises E1009."""
        with self._lock:
            if name not in self._adapters:
                hint = nearest(name, list(self._adapters))
                raise NotFound(f"lora_name={name[:80]!r}: no such adapter{hint}")
            self._publish({key: each for key, each in self._adapters.items() if key != name})

    def restore(self, adapter: RegisteredAdapter | None, name: str) -> None:
        """Undo a load that the engine refused; `adapter` had the name before."""
        with self._lock:
            others = {key: each for key, each in self._adapters.items() if key != name}
            self._publish({**others, name: adapter} if adapter else others)

    def _publish(self, adapters: dict[str, RegisteredAdapter]) -> None:
        self.registry.write(adapters.values())
        self._adapters = adapters

    def _require_free(self, name: str, *, replace: bool) -> None:
        if name in self._adapters:
            if not replace:
                raise InvalidArgument(
                    f"lora_name={name!r}: is loaded; unload it, or send load_inplace: true"
                )
        elif len(self._adapters) >= _MOST_LOADED:
            raise Overloaded(
                f"{_MOST_LOADED} LoRA adapters are loaded, as many as may be; unload one"
            )

    def _copy(self, directory: Path, root: Path | None) -> tuple[LoRAAdapter, Path]:
        """Copy an adapter and check it; it is kept once, in a directory named by its content."""
        present = [name for name in lora_adapter.FILES if (directory / name).is_file()]
        if len(present) < len(lora_adapter.FILES):
            if lora_adapter.WEIGHTS_FILE not in present:
                lora_adapter.read_adapter(directory)  # says what there is instead
            raise EngineCorrupt(f"{directory / lora_adapter.CONFIG_FILE}: missing")
        size = sum((directory / name).stat().st_size for name in present)
        limit = self._settings.max_lora_bytes
        if size > limit:
            raise ModelUnavailable(f"{size} bytes; at most {limit} are taken (MAX_LORA_BYTES)")
        scratch = self._files / ".new"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        digest = hashlib.sha256()
        with disk_full_errors(self._files, f"{directory}: needs {megabytes(size)}", size):
            for name in present:
                _copy_file(directory / name, scratch / name, limit, digest, root)
        try:
            adapter = lora_adapter.read_adapter(scratch)
            lora_adapter.check_adapter(adapter, self.limits)
        except CogTritonError as error:
            shutil.rmtree(scratch)
            shown = str(directory.relative_to(root) if root else directory)
            raise type(error)(error.detail.replace(str(scratch), shown)) from error
        target = self._files / digest.hexdigest()[:32]
        if target.is_dir():
            shutil.rmtree(scratch)
        else:
            scratch.rename(target)
        return adapter, target


def _copy_file(
    source: Path, target: Path, limit: int, digest: hashlib._Hash, root: Path | None
) -> None:
    with source.open("rb") as reading, target.open("xb") as writing:
        # Of what is open now, whatever a link says by then.
        opened = Path(f"/proc/self/fd/{reading.fileno()}").resolve()
        if root is not None and not opened.is_relative_to(root):
            raise InvalidArgument(f"lora_path: {source.name} is a link that leads out of LORA_DIR")
        count = 0
        while chunk := reading.read(_CHUNK):
            count += len(chunk)
            if count > limit:
                raise ModelUnavailable(f"more than {limit} bytes are not taken (MAX_LORA_BYTES)")
            digest.update(chunk)
            writing.write(chunk)
        digest.update(count.to_bytes(8, "little"))


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Context in which coded errors begin with the adapter's name."""
    try:
        yield
    except CogTritonError as error:
        if error.detail.startswith("lora_"):
            raise
        raise type(error)(f"lora_name={name[:80]!r}: {error.detail}") from error


class AdapterUse:
    """Requests with an adapter, from their arrival to their end."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[str, GenerationResult]] = {}
        self.changed = time.time()
        """When `adapters` last may have changed."""

    def enter(self, request: GenerationRequest, result: GenerationResult) -> None:
        """A request arrived, and waits until `admitted`."""
        if (adapter := request.engine.adapter) is not None:
            self._requests[id(result)] = adapter, result
            self.changed = time.time()

    def admitted(self, result: GenerationResult) -> None:
        """A request got its turn: `result` has its queue time."""
        if id(result) in self._requests:
            self.changed = time.time()

    def leave(self, result: GenerationResult) -> None:
        """A request ended."""
        if self._requests.pop(id(result), None):
            self.changed = time.time()

    def adapters(self) -> tuple[Set[str], Set[str]]:
        """The adapters of running and of waiting requests; on any thread."""
        running: set[str] = set()
        waiting: set[str] = set()
        for name, result in tuple(self._requests.values()):
            (waiting if result.queue_time is None else running).add(name)
        return running, waiting
