"""Pins of hub models: the commit that a name without one meant when it was first served."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from cog_triton.download.hub_cache import is_commit
from cog_triton.system.atomic_write import writing


@dataclass(frozen=True)
class RevisionPins:
    """Commits by model and branch or tag, each in a file of its own below `directory`."""

    directory: Path

    def find(self, model_id: str, revision: str | None) -> str | None:
        """The commit to take, or None if the hub is to be asked; a commit needs no pin."""
        if is_commit(revision):
            return revision
        try:
            pin = json.loads(self._path(model_id, revision).read_text("utf-8"))
            commit = pin["commit"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return commit if isinstance(commit, str) and is_commit(commit) else None

    def set(self, model_id: str, revision: str | None, commit: str) -> None:
        """Pin the branch or tag to `commit`, in place of an earlier one."""
        if is_commit(revision):
            return
        pin = {"hub": constants.ENDPOINT, "model_id": model_id, "revision": revision or "main"}
        text = json.dumps({**pin, "commit": commit}).encode()
        with writing(self._path(model_id, revision), len(text), at_most=False) as file:
            file.write(text)

    def _path(self, model_id: str, revision: str | None) -> Path:
        of = "\0".join([constants.ENDPOINT, model_id, revision or "main"])
        return self.directory / f"{hashlib.sha256(of.encode()).hexdigest()[:16]}.json"
