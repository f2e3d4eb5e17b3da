"""scripts/setup brings uv by hash, and takes a Python that fits or has uv bring one."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from http_replies import while_serving

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "python.lock"
[PINNED] = re.findall(r"^uv==(\S+)", LOCK.read_text("utf-8"), re.MULTILINE)
TOOLS = "sh sed cut date uname grep sha256sum rm mkdir mv cat tail flock dirname id sleep tr"
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "small-project"
version = "1"
"""
BACKEND = """
import zipfile
def build_editable(directory, config_settings=None, metadata_directory=None):
    name = "small_project-1-py3-none-any.whl"
    info = "small_project-1.dist-info"
    described = "Metadata-Version: 2.1\\nName: small-project\\nVersion: 1\\n"
    tags = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    with zipfile.ZipFile(f"{directory}/{name}", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", described)
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""


def wheel(directory: Path, name: str, tag: str, files: dict[str, str], version: str = "1") -> str:
    """Write a wheel; returns its line of a lock."""
    path = directory / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in files.items():
            about = zipfile.ZipInfo(member)
            about.external_attr = 0o100755 << 16
            archive.writestr(about, text)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def bring_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; its lock pins a uv of ours, whose wheel is in `index/uv`."""
    spec = importlib.util.spec_from_file_location("bring_uv", ROOT / "scripts" / "bring_uv.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "index" / "uv").mkdir(parents=True)
    tag = "py3-none-manylinux_2_17_" + os.uname().machine
    line = wheel(tmp_path / "index" / "uv", "uv", tag, {"uv-1.data/scripts/uv": "#!/bin/sh\n"})
    (tmp_path / "python.lock").write_text(line)
    monkeypatch.setattr(module, "LOCK", tmp_path / "python.lock")
    return module


@pytest.fixture
def index(tmp_path: Path, bring_uv: ModuleType) -> Iterator[str]:
    """URL of a package index with that wheel."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    handler.func.log_message = lambda *_: None  # type: ignore[method-assign]
    with while_serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        yield url


def test_uv_comes_by_hash_from_pip_or_an_index(
    bring_uv: ModuleType, index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index" / "uv"))
    pip = [sys.executable, "-m", "pip"]
    bring_uv.install(pip, tmp_path / "pip")
    bring_uv.fetch(index, tmp_path / "fetched")
    for place in ("pip", "fetched"):
        assert os.access(tmp_path / place / "bin" / "uv", os.X_OK), place
    (tmp_path / "python.lock").write_text(f"uv==1 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(SystemExit):
        bring_uv.install(pip, tmp_path / "other")
    with pytest.raises(SystemExit, match=r"another hash than requirements/python\.lock"):
        bring_uv.fetch(index, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_settings_of_pip_become_those_of_uv(
    bring_uv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = http://a/simple\nproxy = http://p:1\nfind-links = /none http://b\n"
        "[install]\nindex-url = http://c/simple\nextra-index-url =\n  http://d\n  http://e\n"
    )
    monkeypatch.setattr(bring_uv, "configuration_files", lambda: [file])
    monkeypatch.setenv("PIP_CERT", "/certificate")
    monkeypatch.delenv("SSL_CERT_FILE")
    found = bring_uv.uv_settings()
    del found["UV_INDEX_STRATEGY"]
    found.pop("UV_SYSTEM_CERTS", None)
    assert found == {
        "UV_DEFAULT_INDEX": "http://c/simple",
        "UV_INDEX": "http://d http://e",
        "UV_FIND_LINKS": "http://b",
        "SSL_CERT_FILE": "/certificate",
        "ALL_PROXY": "http://p:1",
    }
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://own")
    monkeypatch.setenv("https_proxy", "http://own")
    assert not {"UV_DEFAULT_INDEX", "ALL_PROXY"} & bring_uv.uv_settings().keys()


def real_uv() -> Path:
    """The pinned uv, which the set-up left here."""
    for one in (Path(sys.executable).parent / "uv", ROOT / ".work" / f"uv-{PINNED}" / "bin" / "uv"):
        if one.exists():
            told = subprocess.run([one, "--version"], capture_output=True, text=True, check=True)
            if told.stdout.split()[1] == PINNED:
                return one
    pytest.skip(f"no uv {PINNED}: scripts/setup brings it")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the real scripts, one small locked package, and PATH of few programs."""
    project = tmp_path / "project"
    (project / "requirements").mkdir(parents=True)
    (project / "wheels").mkdir()
    shutil.copytree(ROOT / "scripts", project / "scripts")
    line = wheel(project / "wheels", "uv", "py3-none-any", {}, PINNED)
    line += wheel(project / "wheels", "small", "py3-none-any", {"small.py": "FOUND = True\n"})
    (project / "requirements" / "python.lock").write_text(line)
    (project / "pyproject.toml").write_text(PYPROJECT)
    (project / "backend.py").write_text(BACKEND)
    (project / "bin").mkdir()
    for tool in TOOLS.split():
        (project / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return project


def set_up(project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/setup there, offline, with nothing but the project's programs."""
    return subprocess.run(
        [project / "scripts" / "setup"],
        env={
            **{"PATH": str(project / "bin"), "HOME": str(project / "home")},
            **{"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(project / "wheels")},
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


def base_python(version: str) -> Path | None:
    """Prefix of a Python of that version with a libpython beside it."""
    own = Path(sys.base_prefix)
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)  # HOME is the tests'
    candidates = [own, *home.glob(f".pyenv/versions/{version}.*")]
    library = f"lib/libpython{version}.so.1.0"
    return next((one for one in candidates if (one / library).exists()), None)


def test_the_python_of_the_machine_is_taken_and_a_second_run_says_nothing(project: Path) -> None:
    (project / "bin" / "uv").symlink_to(real_uv())
    python = Path(sys.executable)
    first = set_up(project, PYTHON=str(python))
    assert (first.returncode, first.stderr) == (0, "")
    version = sysconfig.get_python_version()
    assert f"[2/3] Python {version}: {python}\n" in first.stdout
    assert first.stdout.splitlines()[-1].startswith("setup: done in ")
    own = project / ".venv" / "bin" / "python"
    code = "import small, importlib.metadata as m; print(small.FOUND, m.version('small-project'))"
    shown = subprocess.run([own, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "True 1\n"
    again = set_up(project)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def archive_of(prefix: Path, directory: Path) -> Path:
    """The Python at `prefix` as uv downloads them, and the list of downloads that names it."""
    source = next(prefix.glob("bin/python3.[0-9]*[0-9]"))
    script = "import platform; print(platform.python_version())"
    shown = subprocess.run([source, "-c", script], capture_output=True, text=True, check=True)
    version = shown.stdout.strip()
    numbers = dict(zip(("major", "minor", "patch"), map(int, version.split(".")), strict=True))
    name = f"python{numbers['major']}.{numbers['minor']}"
    root, archive = directory / "python", directory / "python.tar.gz"
    unwanted = shutil.ignore_patterns("test", "idlelib", "tkinter", "site-packages", "__pycache__")
    shutil.copytree(prefix / "lib" / name, root / "lib" / name, ignore=unwanted)
    (root / "lib" / name / "site-packages").mkdir()
    shutil.copy(prefix / "lib" / f"lib{name}.so.1.0", root / "lib")
    (root / "bin").mkdir()
    shutil.copy(source, root / "bin" / name)
    for link in ("python", "python3"):
        (root / "bin" / link).symlink_to(name)
    for data in (root / "lib" / name).glob("_sysconfigdata_*.py"):  # uv replaces /install
        data.write_text(data.read_text("utf-8").replace(str(prefix), "/install"), "utf-8")
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(root, "python")
    described = {
        "name": "cpython",
        "arch": {"family": "x86_64", "variant": None},
        "os": "linux",
        "libc": "gnu",
        **numbers,
        "prerelease": "",
        "url": archive.as_uri(),
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "variant": None,
        "build": "20260101",
    }
    listed = directory / "downloads.json"
    listed.write_text(json.dumps({f"cpython-{version}-linux-x86_64-gnu": described}), "utf-8")
    return listed


def test_uv_brings_a_python_where_the_machine_has_none(project: Path) -> None:
    prefix = base_python("3.12")
    if prefix is None:
        pytest.skip("no Python 3.12 with libpython here to make an archive of")
    (project / "bin" / "uv").symlink_to(real_uv())
    downloads = archive_of(prefix, project / "archives")
    done = set_up(project, UV_PYTHON_DOWNLOADS_JSON_URL=downloads.as_uri())
    assert (done.returncode, done.stderr) == (0, "")
    assert "setup: no python3 here: taking a Python 3.12 of uv's\n" in done.stdout
    own = project / ".venv" / "bin" / "python"
    code = (
        "import os, small, sys, sysconfig; print(sys.base_prefix);"
        "print(os.listdir(sysconfig.get_config_var('LIBDIR')))"
    )
    shown = subprocess.run([own, "-c", code], capture_output=True, text=True, check=True)
    where, libraries = shown.stdout.splitlines()
    assert where.startswith(str(project / "home"))
    assert "libpython3.12.so.1.0" in libraries


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_a_python_that_does_not_fit_is_refused_by_name(project: Path, version: str) -> None:
    (project / "bin" / "uv").symlink_to(real_uv())
    other = project / "bin" / "python3"
    other.write_text(f'#!/bin/sh\n[ "$1" != - ] || echo is Python {version}\n')
    other.chmod(0o755)
    done = set_up(project, PYTHON=str(other))
    assert done.returncode == 1
    assert f"{other} is Python {version}; needed is a Python 3.11 or 3.12" in done.stderr
    assert not (project / ".venv").exists()


def test_python_that_cannot_be_downloaded_is_refused_with_host_variable_and_ways(
    project: Path,
) -> None:
    """As Debian 13 behind a firewall that lets the package index pass."""
    (project / "bin" / "uv").symlink_to(real_uv())
    apt = project / "bin" / "apt-cache"
    apt.write_text('#!/bin/sh\n[ "$2" = libpython3.11 ]\n')
    apt.chmod(0o755)
    mirror = "http://127.0.0.1:1/releases"
    done = set_up(project, UV_PYTHON_INSTALL_MIRROR=mirror, UV_HTTP_RETRIES="0")
    assert done.returncode == 1
    assert "no python3 here; needed is a Python 3.11 or 3.12 with libpython" in done.stderr
    assert "none can be had from http://127.0.0.1:1: UV_PYTHON_INSTALL_MIRROR=URL " in done.stderr
    assert "apt-get install python3.11 libpython3.11" in done.stderr
    assert not (project / ".venv").exists()
