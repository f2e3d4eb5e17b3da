"""Docker archive of two images: one that runs this checkout, and the pod's pause container.

The first has no files of its own: this machine's programs, Python and checkout are mounted into
every container, read-only, by the node's base specification of the runtime.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMAGE, PAUSE = "localhost/cog-triton:checkout", "localhost/pause:1"
_SITE = Path(sys.executable).parents[1]
_WORK = "/opt/cog-triton/work"
_PASSWD = f"root:x:0:0::/root:/bin/bash\ncog:x:1000:1000::{_WORK}:/bin/bash\n"
_SERVER = {
    "Entrypoint": [
        *(sys.executable, "-S", "-I", str(ROOT / "cog_triton" / "system" / "reaper.py"), "--")
    ],
    "Cmd": [sys.executable, "-m", "cog_triton.serve"],
    "WorkingDir": str(ROOT / "runner"),
    "User": "1000:1000",
    "Env": [
        f"PATH={_SITE}/bin:/usr/local/bin:/usr/bin:/bin",
        *(f"HOME={_WORK}", f"COG_TRITON_WORK_DIR={_WORK}"),
        "COG_PREDICT_TYPE_STUB=predict.py:Predictor",
        *("COG_MAX_CONCURRENCY=500", "COG_HOST=0.0.0.0"),
    ],
}


def mounts() -> list[dict[str, Any]]:
    """Mounts of OCI's runtime specification that put this machine's files into a container."""
    paths = ["/usr", "/etc/ssl", "/etc/alternatives", sys.base_prefix, str(ROOT)]
    if not _SITE.is_relative_to(ROOT):
        paths.append(str(_SITE))
    return [
        {"destination": path, "source": path, "type": "bind", "options": ["rbind", "ro"]}
        for path in dict.fromkeys(paths)
    ]


def write(path: Path) -> Path:
    """An archive that `ctr images import` takes."""
    # What /bin/sleep needs, by ldd: a container that only keeps the pod's namespaces.
    sleep = shutil.which("sleep") or "/bin/sleep"
    listed = subprocess.run(["ldd", sleep], capture_output=True, text=True, check=True).stdout
    needed = {word: Path(word).read_bytes() for word in listed.split() if word[0] == "/"}
    pause = _tree({"/bin/sleep": Path(sleep).read_bytes(), **needed}, [])
    places = [mount["destination"] for mount in mounts()] + ["/tmp", "/proc", "/dev", _WORK]
    manifest = []
    with tarfile.open(path, "w") as archive:
        for name, layer, config in (
            (IMAGE, _tree({"/etc/passwd": _PASSWD.encode()}, places), _SERVER),
            (PAUSE, pause, {"Cmd": ["/bin/sleep", "inf"]}),
        ):
            digest = hashlib.sha256(layer).hexdigest()
            rootfs = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
            described = {"architecture": "amd64", "os": "linux", "config": config, "rootfs": rootfs}
            blob = json.dumps(described).encode()
            names = f"{hashlib.sha256(blob).hexdigest()}.json", f"{digest}.tar"
            for member, data in zip(names, (blob, layer), strict=True):
                _add(archive, member, data)
            manifest.append({"Config": names[0], "RepoTags": [name], "Layers": [names[1]]})
        _add(archive, "manifest.json", json.dumps(manifest).encode())
    return path


def _tree(files: dict[str, bytes], directories: list[str]) -> bytes:
    """A layer with files, directories that are mounted over, and Debian's links into /usr."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        above = {parent for file in files for parent in Path(file).parents}
        above |= {one for name in directories for one in (Path(name), *Path(name).parents)}
        for place in sorted(above - {Path("/")}):
            info = tarfile.TarInfo(str(place)[1:])
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for name in ("bin", "sbin", "lib", "lib64") if directories else ():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
        for name, data in files.items():
            _add(tar, name[1:], data, 0o755)
    return made.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    tar.addfile(info, io.BytesIO(data))
