"""`nix flake check`: what it builds without a GPU."""

from __future__ import annotations

import re

import pytest
from factory import SYSTEM, Factory, run


@pytest.fixture(scope="module")
def with_tests(tmp_path_factory: pytest.TempPathFactory) -> Factory:
    """The flake, with the wheels that its tests need."""
    return Factory(tmp_path_factory.mktemp("checks"), ("cog", "cpu", "tests"))


def test_every_package_and_function_is_evaluated(with_tests: Factory) -> None:
    (listed,) = with_tests.build(f"checks.{SYSTEM}.evaluated")
    found = re.findall(r"^/nix/store/\w+-(.+)-image\.drv$", listed.read_text(), re.MULTILINE)
    made = {"cog-triton-builder", "cog-triton-builder-86"}
    made |= {"cog-triton-runner-cpu", "cog-triton-runner-cpu-model", "cog-triton-runner-120"}
    made |= {"cog-triton-builder-vllm-80", "cog-triton-builder-vllm-86"}
    made |= {"cog-triton-runner-80-89", "cog-triton-runner-vllm-80-89", "cog-triton-runner-vllm-90"}
    assert set(found) >= made
    assert len(found) == 28


def test_unit_tests_run_as_a_check(with_tests: Factory) -> None:
    (said,) = with_tests.build(f"checks.{SYSTEM}.unit-tests")
    passed = re.search(r"^(\d+) passed", said.read_text(), re.MULTILINE)
    assert passed
    assert int(passed[1]) > 1000
    assert "failed" not in said.read_text()
    attribute = with_tests.attribute(f"checks.{SYSTEM}.unit-tests.drvPath")
    needed = run("nix-store", "--query", "--requisites", with_tests.nix("eval", "--raw", attribute))
    wheels = re.findall(r"^\S+-cog-triton-wheels-\w+\.drv$", needed, re.MULTILINE)
    assert len(wheels) == 5
    outputs = run("nix-store", "--query", "--outputs", *wheels).split()
    run("nix-store", "--verify-path", *outputs)  # which root's pytest could have written to
