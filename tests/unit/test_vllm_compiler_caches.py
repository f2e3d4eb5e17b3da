"""Where the compilers of a vLLM engine write."""

from __future__ import annotations

from pathlib import Path

from cog_triton.engines.vllm import compiler_caches

SWITCHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "VLLM_ENABLE_STARTUP_PLAN"}


def test_every_compiler_has_a_directory_of_its_own_below_the_root(tmp_path: Path) -> None:
    made = compiler_caches.variables(tmp_path)
    places = {value for name, value in made.items() if name not in SWITCHES}
    assert {"VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"} < set(made)
    assert {made[name] for name in SWITCHES} == {"1"}
    assert len(places) == len(made) - len(SWITCHES)
    assert all(Path(place).parent == tmp_path for place in places)


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    given = {"TRITON_CACHE_DIR": "/mine", "VLLM_ENABLE_STARTUP_PLAN": "0"}
    left = compiler_caches.missing(tmp_path, given)
    assert not set(left) & set(given)
    assert left["VLLM_CACHE_ROOT"] == str(tmp_path / "vllm")


def test_a_cache_root_of_the_users_gets_no_plan_of_ours(tmp_path: Path) -> None:
    left = compiler_caches.missing(tmp_path, {"VLLM_CACHE_ROOT": "/mine"})
    assert "VLLM_ENABLE_STARTUP_PLAN" not in left
    assert left["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
