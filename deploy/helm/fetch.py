"""The model of SOURCE in the directory CACHED, whole and read-only: what the chart's Job runs."""

import os
import shutil
from pathlib import Path

from huggingface_hub import snapshot_download

from cog_triton.serving.engine_preparation import engine_directory
from cog_triton.settings import load_settings

source, cached = os.environ["SOURCE"], Path(os.environ["CACHED"])
mine = cached.with_name(f"{cached.name}.{os.environ['POD']}")  # another pod may fetch it, too
model = mine / "model"
if not cached.exists():
    mine.mkdir(exist_ok=True)
    if "://" in source:
        settings = load_settings(cog_triton_work_dir=mine)
        found = engine_directory(settings, source)
        shutil.rmtree(mine / "downloads", ignore_errors=True)
        model.unlink(missing_ok=True)
        model.symlink_to(found.relative_to(mine))
    else:
        snapshot_download(source, revision=os.environ.get("REVISION"), local_dir=model)
    for path in mine.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o444)
    try:
        mine.rename(cached)
    except OSError:
        if not cached.exists():
            raise
if mine.exists():
    shutil.rmtree(mine)
print(cached / "model")
