"""What docs/deploy.md tells users of a cluster to type is taken by Helm and Kubernetes."""

from __future__ import annotations

import re
import shlex

from chart_rendering import EXAMPLES, KUBERNETES, ROOT, by_name, example, faults, rendered

PAGE = (ROOT / "docs" / "deploy.md").read_text()


def test_kubernetes_takes_its_manifests() -> None:
    found = [by_name(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)]
    assert [set(item) for item in found] == [
        {("PersistentVolumeClaim", "models"), ("Job", "model")}
    ]
    assert {key: faults(item) for key, item in found[0].items() if faults(item)} == {}
    # The server finds the model where the Job puts it.
    values = example("one-gpu-vllm")
    job = str(found[0]["Job", "model"])
    assert f'local_dir="/models/{values["model"]["path"]}"' in job
    assert ("PersistentVolumeClaim", values["model"]["claim"]) in found[0]


def test_helm_takes_its_command() -> None:
    import helm_python

    (command,) = re.findall(r"^helm install (?:.*\\\n)*.*", PAGE, re.M)
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    assert words[:4] == ["helm", "install", "cog-triton", "deploy/helm"]
    options: dict[str, tuple[str, ...]] = {"-f": (), "--set": ()}
    for option, value in zip(words[4::2], words[5::2], strict=True):
        options[option] += (value,)
    (file,) = options["-f"]
    values = helm_python.values_from_yaml((ROOT / file).read_text())
    for given in options["--set"]:
        for name, value in helm_python.parse_set_string(given).items():
            values[name] = {**values.get(name, {}), **value}
    (server,) = rendered(values)["Deployment", "cog-triton"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert server["image"] == "registry.example.com/cog-triton-runner-vllm-89:1"


def test_every_shape_is_on_the_page() -> None:
    table = PAGE.partition("| file | is |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `([\w-]+)\.yaml`", table, re.M)) == EXAMPLES


def test_the_versions_are_told() -> None:
    import helm_python

    assert f"Helm {helm_python.helm_sdk_version().removeprefix('v')} " in PAGE
    assert f"**Kubernetes {KUBERNETES}**" in PAGE
    for line in (
        (ROOT / "requirements" / "tools.in").read_text().partition("# tests/stores")[0].splitlines()
    ):
        if "==" in line:
            name, _, version = line.partition("==")
            assert f"`{name}` {version}" in PAGE
