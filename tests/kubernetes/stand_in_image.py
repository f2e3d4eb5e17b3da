"""OCI archive of two images: one that runs this checkout, and the pod's pause container.

The first has no files of its own: this machine's programs, Python and checkout are mounted into
every container, read-only, by the nodes' base specification of the runtime.
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
_SYSTEM = ("/usr", "/etc/ssl", "/etc/alternatives")
_SITE = Path(sys.executable).parents[1]
_REAPER = ROOT / "cog_triton" / "system" / "reaper.py"
_DEMO = Path("/opt/cog-triton")
_PASSWD = "root:x:0:0::/root:/bin/bash\ncog:x:1000:1000::/opt/cog-triton/work:/bin/bash\n"


def mounts() -> list[dict[str, Any]]:
    """Mounts of OCI's runtime specification that put this machine's files into a container."""
    paths = [*_SYSTEM, sys.base_prefix, str(ROOT)]
    if not _SITE.is_relative_to(ROOT):
        paths.append(str(_SITE))
    return [
        {"destination": path, "source": path, "type": "bind", "options": ["rbind", "ro"]}
        for path in dict.fromkeys(paths)
    ]


def write(path: Path) -> Path:
    """An archive that `ctr images import` takes."""
    server = {
        "Entrypoint": [sys.executable, "-S", "-I", str(_REAPER), "--"],
        "Cmd": [sys.executable, "-m", "cog_triton.serve"],
        "WorkingDir": str(ROOT / "runner"),
        "User": "1000:1000",
        "Env": [
            f"PATH={_SITE}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME=/opt/cog-triton/work",
            "COG_TRITON_WORK_DIR=/opt/cog-triton/work",
            "COG_PREDICT_TYPE_STUB=predict.py:Predictor",
            "COG_MAX_CONCURRENCY=500",
            "COG_HOST=0.0.0.0",
        ],
    }
    blobs: dict[str, bytes] = {}
    manifests = [
        {**_image(blobs, _rootfs(), server), "annotations": _named(IMAGE)},
        {**_image(blobs, _pause(), {"Cmd": ["/bin/sleep", "inf"]}), "annotations": _named(PAUSE)},
    ]
    index = {"schemaVersion": 2, "manifests": manifests}
    with tarfile.open(path, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(archive, "index.json", json.dumps(index).encode())
        for digest, data in blobs.items():
            _add(archive, f"blobs/sha256/{digest}", data)
    return path


def _named(reference: str) -> dict[str, str]:
    return {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
    }


def _image(blobs: dict[str, bytes], layer: bytes, config: dict[str, Any]) -> dict[str, Any]:
    def blob(kind: str, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

    layers = [blob("layer.v1.tar", layer)]
    described = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layers[0]["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob("config.v1+json", json.dumps(described).encode()),
        "layers": layers,
    }
    return blob("manifest.v1+json", json.dumps(manifest).encode())


def _rootfs() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        named = [Path(mount["destination"]) for mount in mounts()]
        whole = {parent for path in named for parent in (path, *path.parents)}
        for path in sorted(
            whole | {Path("/tmp"), Path("/proc"), Path("/dev"), _DEMO, _DEMO / "work"}
        ):
            if path != Path("/"):
                _directory(tar, str(path)[1:])
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
        _add(tar, "etc/passwd", _PASSWD.encode())
    return made.getvalue()


def _pause() -> bytes:
    """What /bin/sleep needs, by ldd: a container that only keeps the pod's namespaces."""
    sleep = shutil.which("sleep") or "/bin/sleep"
    listed = subprocess.run(["ldd", sleep], capture_output=True, text=True, check=True).stdout
    libraries = {word for word in listed.split() if word.startswith("/")}
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, file in {"/bin/sleep": sleep, **{path: path for path in libraries}}.items():
            for parent in reversed(Path(name[1:]).parents):
                if str(parent) != ".":
                    _directory(tar, str(parent))
            _add(tar, name[1:], Path(file).read_bytes(), 0o755)
    return made.getvalue()


def _directory(tar: tarfile.TarFile, name: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o755
    tar.addfile(info)


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    tar.addfile(info, io.BytesIO(data))
