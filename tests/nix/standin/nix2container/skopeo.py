"""Stand-in of skopeo with nix2container's patch: copies `nix:IMAGE` to archive or registry.

skopeo --insecure-policy copy [--quiet] [OPTION...] nix:IMAGE docker-archive:/dev/stdout:REF
skopeo --insecure-policy copy [--quiet] [OPTION...] nix:IMAGE docker://REF
skopeo --insecure-policy inspect --config --raw nix:IMAGE
skopeo inspect [OPTION...] docker://REF
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).parent))

import layers


def configuration(image: dict) -> bytes:
    """Configuration blob of the image."""
    blob = {
        "architecture": image["arch"],
        "os": "linux",
        "created": image["created"],
        "config": image["image-config"],
        "rootfs": {"type": "layers", "diff_ids": [layer["diff_ids"] for layer in image["layers"]]},
        "history": [layer["History"] for layer in image["layers"]],
    }
    return json.dumps(blob, sort_keys=True).encode()


def write_archive(image: dict, reference: str, target: BinaryIO) -> None:
    """Write a docker-archive; each layer must have the digest that it was built with."""
    config = configuration(image)
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    names: list[str] = []
    with tarfile.open(fileobj=target, mode="w|") as archive:

        def put(name: str, data: bytes) -> None:
            item = tarfile.TarInfo(name)
            item.size = len(data)
            archive.addfile(item, io.BytesIO(data))

        for layer in image["layers"]:
            name = layer["digest"].removeprefix("sha256:") + ".tar"
            if name not in names:
                item = tarfile.TarInfo(name)
                item.size = layer["size"]
                with tempfile.TemporaryFile() as file:
                    digest = layers.Digest(file)
                    layers.write_tar(layer["paths"], digest)
                    if f"sha256:{digest.sha256.hexdigest()}" != layer["digest"]:
                        raise SystemExit(f"layer {name} changed since it was built")
                    file.seek(0)
                    archive.addfile(item, file)
            names.append(name)
        put(config_name, config)
        manifest = {"Config": config_name, "RepoTags": [reference], "Layers": names}
        put("manifest.json", json.dumps([manifest]).encode())


def main(arguments: list[str]) -> int:
    """Command line, as far as it is used."""
    if arguments[0] == "inspect" and arguments[-1].startswith("docker://"):
        return subprocess.run(["skopeo", *arguments]).returncode
    if arguments[:-1] == ["--insecure-policy", "inspect", "--config", "--raw"]:
        image = json.loads(Path(arguments[-1].removeprefix("nix:")).read_text())
        sys.stdout.buffer.write(configuration(image))
        return 0
    head, verb, *options, source, target = arguments
    if head != "--insecure-policy" or verb != "copy" or not source.startswith("nix:"):
        raise SystemExit(f"not understood: {arguments}")
    quiet = "--quiet" in options
    image = json.loads(Path(source.removeprefix("nix:")).read_text())
    if target.startswith("docker-archive:/dev/stdout:"):
        if not quiet:
            raise SystemExit("without --quiet, progress goes into the archive")
        write_archive(image, target.removeprefix("docker-archive:/dev/stdout:"), sys.stdout.buffer)
        return 0
    if target.startswith("docker://"):
        with tempfile.NamedTemporaryFile(suffix=".tar") as file:
            write_archive(image, "image:latest", file)
            file.flush()
            # Debian 12's skopeo (1.9) has not this one yet.
            known = [option for option in options if option != "--dest-force-compress-format"]
            command = ["skopeo", "--insecure-policy", "copy", *known]
            return subprocess.run([*command, f"docker-archive:{file.name}", target]).returncode
    raise SystemExit(f"not understood: {target}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
