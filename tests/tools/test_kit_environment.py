"""The environment that scripts/pack-gpu packs is the one that scripts/setup-gpu unpacks."""

from __future__ import annotations

import importlib
import random
import shutil
import zipfile
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("zstd"), reason="zstd is not installed")


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    """The scripts, which are beside one another and in no package."""
    with pytest.MonkeyPatch.context() as patch:
        for place in ("scripts", "tests/gpu/image"):
            patch.syspath_prepend(str(HERE / place))
        loader = SourceFileLoader("pack_gpu", str(HERE / "scripts" / "pack-gpu"))
        spec = spec_from_loader("pack_gpu", loader)
        assert spec
        pack = module_from_spec(spec)
        loader.exec_module(pack)
        unpack = importlib.import_module("unpack_environment")
        yield SimpleNamespace(pack=pack, unpack=unpack)


@pytest.fixture
def packed(gpu: SimpleNamespace, tmp_path: Path) -> SimpleNamespace:
    """A site-packages of which the other machine has one large file, and an older other."""
    for name in ("site/lib", "there", "installed", "root/deltas", "root/tools"):
        (tmp_path / name).mkdir(parents=True)
    same, old, own = (random.Random(number).randbytes(1_200_000) for number in range(3))
    files = {"lib/same.so": same, "lib/newer.so": old[:600_000] + b"new" + old[600_000:],
             "lib/own.so": own, "lib/small.py": b"x = 1\n"}  # fmt: skip
    for name, data in files.items():
        (tmp_path / "site" / name).write_bytes(data)
    (tmp_path / "site" / "link.so").symlink_to("lib/own.so")
    with zipfile.ZipFile(tmp_path / "there" / "them-1-py3-none-any.whl", "w") as wheel:
        for name, data in (("lib/same.so", same), ("lib/newer.so", old), ("lib/small.py", b"y\n")):
            wheel.writestr(name, data)
            (tmp_path / "installed" / Path(name).name).write_bytes(data)
    packer = gpu.pack.Environment(tmp_path / "there", tmp_path / "root" / "deltas")
    packer.write(tmp_path / "site", tmp_path / "root" / "environment.tar.zst")
    (tmp_path / "root" / "held.json").write_text(gpu.pack.json.dumps(packer.held))
    return SimpleNamespace(root=tmp_path / "root", files=files, held=packer.held, path=tmp_path)


def test_an_unpacked_environment_is_the_packed_one(
    gpu: SimpleNamespace, packed: SimpleNamespace, tmp_path: Path
) -> None:
    assert {row["name"]: bool(row["delta"]) for row in packed.held} == {
        "lib/same.so": False,
        "lib/newer.so": True,
    }
    assert (packed.root / "environment.tar.zst").stat().st_size < 1_300_000
    site = tmp_path / "made"
    gpu.unpack.main(packed.root, site, [str(tmp_path / "installed")])
    assert {name: (site / name).read_bytes() for name in packed.files} == packed.files
    assert (site / "link.so").read_bytes() == packed.files["lib/own.so"]


def test_what_the_machine_lacks_is_named(
    gpu: SimpleNamespace, packed: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "installed" / "same.so").unlink()
    with pytest.raises(SystemExit, match=r"this machine lacks what lib/same.so is made of"):
        gpu.unpack.main(packed.root, tmp_path / "made", [str(tmp_path / "installed")])
