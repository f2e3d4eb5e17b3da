"""File that a command writes for the user, who has not asked for another's to be lost."""

from __future__ import annotations

from pathlib import Path

from cog_triton.errors import InvalidArgument
from cog_triton.system.atomic_write import writing


def write(path: Path, text: str, *, force: bool) -> None:
    """Write `text`, whole or not at all.

    Raises:
        InvalidArgument: there is such a file and `force` is not given, or it cannot be written.
    """
    if path.exists() and not force:
        raise InvalidArgument(f"{path} is there already: give --force to overwrite it, or -o")
    content = text.encode()
    try:
        with writing(path, len(content), at_most=False) as file:
            file.write(content)
    except OSError as error:
        raise InvalidArgument(f"--output {path}: {error.strerror}") from error
