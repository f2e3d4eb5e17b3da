"""Small wheels under the names of the vLLM images' lock, for building one in seconds.

`vllm` is the double of vLLM, the libraries that are pruned or left out have device code for several
GPUs, and every other wheel has one module that says its name.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from pathlib import Path

from unit import fatbins
from vllm_engines import DOUBLES

SMS = (80, 86, 89, 90, 100, 103, 120)


def device_code(*sms: int) -> bytes:
    """A library with code for each of these GPUs, in one container."""
    return fatbins.library(fatbins.container(*(fatbins.Image(number=sm) for sm in sms)))


def files_of(name: str) -> dict[str, bytes]:
    """What the wheel of a distribution holds beside its metadata."""
    if name == "vllm":
        double = DOUBLES / "vllm"
        files = {str(path.relative_to(DOUBLES)): path.read_bytes() for path in double.rglob("*.py")}
        files["vllm/_C.abi3.so"] = device_code(*SMS)
        files["vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"] = device_code(90)
        files["vllm/vllm-rs"] = b"the Rust front end"
        return files
    if name == "torch":
        return {
            "torch/__init__.py": b"",
            "torch/lib/libtorch_cuda.so": device_code(*SMS),
            "torch/lib/libtorch_static.a": b"static",
        }
    if name == "nvidia-cublas":
        return {"nvidia/cu13/lib/libcublas.so.13": device_code(*SMS)}
    if name == "triton":
        names = ("ptxas", "ptxas-blackwell")
        return {f"triton/backends/nvidia/bin/{tool}": tool.encode() for tool in names}
    return {f"{name.replace('-', '_')}_small.py": f"NAME = {name!r}\n".encode()}


def wheel(name: str, file: str, directory: Path) -> Path:
    """Write the wheel of a distribution under its locked file name."""
    version = file.split("-")[1]
    info = f"{file.split('-')[0]}-{version}.dist-info"
    tags = "-".join(file.removesuffix(".whl").split("-")[-3:])
    content = files_of(name)
    content[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    )
    content[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tags}\n".encode()
    rows = []
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    target = directory / file
    with zipfile.ZipFile(target, "w") as archive:
        for path, data in content.items():
            archive.writestr(zipfile.ZipInfo(path), data)
    return target


def replace(source: Path, version: str, directory: Path) -> list[Path]:
    """Make small wheels of vLLM's group in `source`'s nix/wheels.json but of those that other
    images have as well, and write them there as those of Python `version`; returns their paths.
    """
    table = source / "nix" / "wheels.json"
    rows = json.loads(table.read_text())
    directory.mkdir()
    made, group = [], f"{version} vllm"
    for row in [row for row in rows if "3.12 vllm" in row["groups"]]:
        row["groups"].remove("3.12 vllm")
        own = [
            each
            for each in rows
            if each["name"] == row["name"]
            and (
                f"{version} cog" in each["groups"]
                or (f"{version} cpu" in each["groups"] and row["name"] == "nvidia-pytriton")
            )
        ]
        if own:
            own[0]["groups"].append(group)
            continue
        path = wheel(row["name"], row["file"], directory)
        rows.append({**row, "hash": f"sha256-{_digest(path)}", "groups": [group]})
        made.append(path)
    table.write_text(json.dumps(rows, indent=2))
    return made


def _digest(path: Path) -> str:
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
