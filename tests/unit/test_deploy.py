"""Cluster files: the Slurm script, the chart's script that fetches, its dashboard and alerts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hub_server import ID, MAIN, serving_hub
from range_server import Content, serving_file
from sample_engines import packed

from cog_triton.artifact import engine_manifest, engine_tar
from cog_triton.sources.source import Source

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm"
PANELS = json.loads((CHART / "dashboards" / "cog-triton.json").read_text("utf-8"))["panels"]
FILES = {
    "dashboard": "\n".join(t["expr"] for panel in PANELS for t in panel.get("targets", ())),
    "alerts": (CHART / "templates" / "prometheusrule.yaml").read_text("utf-8"),
    "autoscaling": (CHART / "templates" / "scaledobject.yaml").read_text("utf-8"),
}
FETCH = CHART / "fetch.py"
SLURM = ROOT / "deploy" / "slurm.sh"
SRUN = """#!/bin/bash
printf '%s\\n' "$@" > srun-arguments
while [[ $1 == --* ]]; do shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do SLURM_PROCID=$task "$@" || exit $?; done
"""
COG_TRITON = """#!/bin/bash
cp "$COG_TRITON_CONFIG" config-$COG_TRITON_RANK
echo "$COG_TRITON_RANK of $WORLD_SIZE in $COG_TRITON_WORK_DIR: $*" >> ranks
exit ${CODE:-0}
"""


def program(directory: Path, name: str, text: str) -> None:
    path = directory / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def sbatch(directory: Path, srun: str = SRUN, **variables: str) -> subprocess.CompletedProcess[str]:
    program(directory, "srun", srun)
    program(directory, "cog-triton", COG_TRITON)
    program(directory, "scontrol", '#!/bin/sh\necho "$@" > scontrol-arguments\n')
    return subprocess.run(
        [SLURM],
        cwd=directory,
        env={
            "PATH": f"{directory}/bin:{os.environ['PATH']}",
            "SLURM_NTASKS": "4",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "gpu-[1-2]",
            "SLURM_SUBMIT_DIR": str(directory),
            **variables,
        },
        capture_output=True,
        text=True,
    )


def test_slurm_starts_cog_on_rank_0_and_triton_alone_on_the_others(tmp_path: Path) -> None:
    done = sbatch(tmp_path, ENGINE="/shared/engine")
    assert done.returncode == 0, done.stderr
    ranks = (tmp_path / "ranks").read_text().splitlines()
    assert ranks[0] == "0 of 4 in /tmp/cog-triton-7-0: serve /shared/engine --host 0.0.0.0"
    assert ranks[1:] == [
        f"{n} of 4 in /tmp/cog-triton-7-{n}: serve /shared/engine --triton-only" for n in (1, 2, 3)
    ]
    arguments = (tmp_path / "srun-arguments").read_text().splitlines()
    assert {"--mpi=pmix", "--kill-on-bad-exit=1"} <= {*arguments}
    assert not [word for word in arguments if word.startswith("--container")]
    config = yaml.safe_load((tmp_path / "config-1").read_text())
    assert config == {"tensorrt_llm": {"args": {"num_nodes": 2}}}
    assert not list(tmp_path.glob("*.yaml"))


def test_slurm_mounts_keys_and_certificates_by_their_directories(tmp_path: Path) -> None:
    keys, chain = "/shared/tenants/keys", "/shared/tls/chain.pem"
    done = sbatch(tmp_path, ENGINE="/e", IMAGE="i", COG_TRITON_KEYS=keys, TLS_CERT_FILE=chain)
    mounts = f"--container-mounts=/e,{tmp_path},/shared/tenants,/shared/tls"
    arguments = (tmp_path / "srun-arguments").read_text().splitlines()
    assert {mounts, "--container-image=i"} <= {*arguments}
    assert "; https://" in done.stdout


def test_slurm_asks_a_server_with_tls_to_drain(tmp_path: Path) -> None:
    program(tmp_path, "curl", '#!/bin/bash\nprintf "%s\\n" "$@" > curl-arguments\ntouch asked\n')
    # The job's own process is sent SIGTERM, as by --signal=B:TERM, and its task ends once asked.
    ends = "#!/bin/bash\nkill -TERM $PPID\nuntil [[ -e asked ]]; do sleep 0.05; done\n"
    ends += "sleep 1; touch drained\n"
    done = sbatch(tmp_path, srun=ends, ENGINE="/e", TLS_CERT_FILE="/c", PORT="7")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "drained").exists()
    asked = (tmp_path / "curl-arguments").read_text().splitlines()
    assert asked[-3:] == ["-X", "POST", "https://127.0.0.1:7/shutdown"]


def test_slurm_passes_a_failure_on(tmp_path: Path) -> None:
    done = sbatch(tmp_path, ENGINE="/shared/engine", CODE="3")
    assert done.returncode == 3
    assert not (tmp_path / "scontrol-arguments").exists()
    done = sbatch(tmp_path, ENGINE="/shared/engine", CODE="3", REQUEUE="1")
    assert done.returncode == 3
    assert (tmp_path / "scontrol-arguments").read_text() == "requeue 7\n"


def fetched(cache: Path, name: str, source: str, **variables: str) -> Path:
    """Where the chart's Job has put a model; `name` is of the pod."""
    environment = {"SOURCE": source, "CACHED": str(cache / "x"), "POD": name, **variables}
    done = subprocess.run(
        [sys.executable, "-c", FETCH.read_text()],
        env={**os.environ, **environment, "HOME": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in cache.glob("x*")) == ["x"]
    return Path(done.stdout.splitlines()[-1])


def test_a_job_fetches_a_model_of_the_hub_once_for_all(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"x" * 5000}
    with serving_hub(files) as hub:
        model = fetched(tmp_path, "a", ID, HF_ENDPOINT=hub.url, REVISION=MAIN)
        assert {name: (model / name).read_bytes() for name in files} == files
        assert not any(path.stat().st_mode & 0o222 for path in model.glob("*") if path.is_file())
        asked = len(hub.requests)
        assert fetched(tmp_path, "b", ID, HF_ENDPOINT=hub.url) == model
        assert len(hub.requests) == asked


def test_a_job_unpacks_an_engine_that_the_server_takes(tmp_path: Path) -> None:
    tar = packed(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "x.a").mkdir()  # of a container that was killed
    with serving_file(Content.of(tar.read_bytes())) as server:
        model = fetched(tmp_path / "cache", "a", f"{server.url}/engine.tar")
    manifest = engine_manifest.load(model)
    assert manifest is not None
    assert engine_tar.differences(manifest, Source.open(str(model)).files(checksums=True)) == []
    assert not (model.parent / "downloads").exists()


@pytest.mark.parametrize("file", FILES)
def test_each_metric_is_exported(file: str) -> None:
    stored = (ROOT / "tests" / "surface.txt").read_text("utf-8")
    exported = set(re.findall(r"^metric openai (\S+)$", stored, re.MULTILINE))
    # The mock has no KV cache, and nothing was refused.
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    found = re.findall(r"`((?:prefix_cache|door)_\w+)[`{]", page)
    exported |= {f"cog_triton_{name}" for name in found}
    named = set(re.findall(r"\b(?:cog_triton|process|python)_\w+(?=\{)", FILES[file]))
    assert named
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= exported
