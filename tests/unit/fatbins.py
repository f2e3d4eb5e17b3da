"""Fat binaries, cubins and shared objects for tests: made by hand, or by nvcc if installed."""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


def _nvcc() -> str | None:
    """Path of an nvcc that knows sm_103a and sm_100f: CUDA 12.9 or later."""
    found = shutil.which("nvcc")
    if found is None:
        return None
    said = subprocess.run([found, "--version"], check=True, capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", said)
    return found if release and (int(release[1]), int(release[2])) >= (12, 9) else None


NVCC = _nvcc()
CUOBJDUMP = shutil.which("cuobjdump")
PTX, CUBIN, LTO = 1, 2, 8
VARIANTS = {"": 0, "a": 0x100000, "f": 0x200000}
ZSTD = 0x8000
SHARED = 3


def elf(
    sections: Sequence[tuple[str, int, int, bytes]] = (),
    machine: int = 62,
    type_: int = SHARED,
    abi: int = 0,
    flags: int = 0,
) -> bytes:
    """An ELF file with `sections` (name, type, flags, content), each aligned to 8 bytes."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, *_ in sections) + b".shstrtab\0"
    body = bytearray(64)
    rows = [bytes(64)]
    for name, kind, section_flags, content in [*sections, (".shstrtab", 3, 0, names)]:
        body += bytes(-len(body) % 8)
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        rows.append(
            struct.pack(
                "<IIQQQQIIQQ", at, kind, section_flags, 0, len(body), len(content), 0, 0, 8, 0
            )
        )
        body += content
    body += bytes(-len(body) % 8)
    ident = b"\x7fELF\x02\x01\x01\0" + bytes([abi]) + bytes(7)
    body[:64] = struct.pack(
        "<16sHHIQQQIHHHHHH",
        *(ident, type_, machine, 1, 0, 0, len(body), flags, 64, 0, 0, 64, len(rows), len(rows) - 1),
    )
    return bytes(body) + b"".join(rows)


@functools.cache
def cubin(sm: int, abi: int = 8, text: bytes = b"code") -> bytes:
    """A CUDA ELF image for `sm`, padded to 8 bytes; `abi` 7 as of CUDA 12, 8 as of CUDA 13."""
    flags = {7: sm << 16 | 0x500 | sm, 8: 0x6000004 | sm << 8}.get(abi, 0)
    image = elf(
        [(".nv.info", 0x70000000, 0, bytes(16)), (".text.k", 1, 6, text * 8)],
        machine=190,
        type_=2,
        abi=abi,
        flags=flags,
    )
    return image + bytes(-len(image) % 8)


@dataclass(frozen=True)
class Image:
    """One entry to be; `packed` stores it compressed, as far as a header tells."""

    kind: int = CUBIN
    number: int = 80
    variant: str = ""
    packed: bool = False
    name: bytes = b""
    payload: bytes = b""

    def pack(self) -> bytes:
        name = self.name + bytes(-len(self.name) % 8)
        payload = self.payload
        if not payload:
            payload = cubin(self.number) if self.kind == CUBIN else b".version 9.0 //\0"
        compressed = 0
        if self.packed:
            payload = b"\x28\xb5\x2f\xfd" + f"{self}".encode()
            compressed = len(payload)
            payload += bytes(-len(payload) % 8)
        head = struct.pack(
            "<HHIQIIHHIIIQQQ",
            *(self.kind, 0x101, 64 + len(name), len(payload), compressed, 0, 8, 1, self.number),
            *(64 if name else 0, len(self.name)),
            *(0x11 | VARIANTS[self.variant] | (ZSTD if self.packed else 0), 0, 0),
        )
        return head + name + payload


def container(*images: Image) -> bytes:
    """A container of `images`."""
    body = b"".join(image.pack() for image in images)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(fatbin: bytes, rodata: bytes = b"\0", section: str = ".nv_fatbin") -> bytes:
    """A shared object with device code in `section` and with `rodata`."""
    return elf([(".rodata", 1, 2, rodata), (section, 1, 2, fatbin), (".text", 1, 6, b"\xc3" * 9)])


KERNEL = """
__global__ void add(float *a, const float *b, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) a[i] += b[i] * __sinf(a[i]);
}
extern "C" void run(float *a, const float *b, int n) { add<<<1, 128>>>(a, b, n); }
"""


def compiled(directory: Path, codes: str, *options: str) -> Path:
    """A shared object that nvcc builds of two sources, for `codes`: "sm_80 sm_90a compute_90"."""
    assert NVCC
    arguments = []
    for code in codes.split():
        arguments += ["-gencode", f"arch={code.replace('sm_', 'compute_')},code={code}"]
    sources = []
    for name in ("one", "two"):
        source = directory / f"{name}.cu"
        source.write_text(KERNEL.replace("run", f"run_{name}").replace("add", f"add_{name}"))
        sources.append(str(source))
    made = directory / "libtorch_made.so"
    subprocess.run(
        [
            *(NVCC, "-shared", "-Xcompiler", "-fPIC", "-cudart", "none", "-o", str(made)),
            *(*sources, *arguments, *options),
        ],
        check=True,
        cwd=directory,
        capture_output=True,
    )
    return made
