"""Images under vLLM: which models take them, and the host over the double of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_files import FORMATS, bomb, image, told
from vllm_engines import MAX_MODEL_LEN, VISION, vllm_engine
from vllm_hosts import (
    Running,
    ask,
    failure,
    over_double,
    running,
    text,
    token_ids,
    tokens,
)

from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.engines.vllm.image_decoding import decode_images
from cog_triton.errors import InvalidArgument, InvalidPredictorConfig, PromptTooLong
from cog_triton.pictures.image_limits import ImagePart

LLAMA = {"architectures": ["LlamaForCausalLM"]}
PROMPT_IDS = [*b"a\x01b"]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    values = {"config": VISION, "limit_mm_per_prompt": {"image": 2}}
    with over_double(tmp_path_factory.mktemp("host"), **values) as started:
        yield started


def parts(*files: bytes) -> tuple[ImagePart, ...]:
    return tuple(ImagePart(f"part {number}", data) for number, data in enumerate(files))


@pytest.mark.parametrize(
    ("config", "arguments", "count", "placeholder"),
    [
        (LLAMA, {}, 0, None),
        ({}, {}, 0, None),
        ({"architectures": "Qwen2VLForConditionalGeneration"}, {}, 0, None),
        (VISION, {}, 999, "<|vision_start|><|image_pad|><|vision_end|>"),
        (VISION, {"limit_mm_per_prompt": {"image": 2, "video": 0}}, 2, "<|vision_start|>"),
        (VISION, {"limit_mm_per_prompt": {"image": {"count": 3, "width": 9}}}, 3, "<|vision"),
        (VISION, {"limit_mm_per_prompt": {"image": 0}}, 0, "<|vision_start|>"),
        (VISION, {"limit_mm_per_prompt": {"video": 1}}, 999, "<|vision_start|>"),
        (VISION, {"language_model_only": True}, 0, "<|vision_start|>"),
        ({"architectures": ["PixtralForConditionalGeneration"]}, {}, 999, None),
        ({"architectures": ["Phi3VForCausalLM"]}, {}, 999, "<|image_{}|>"),
        ({"architectures": ["WhisperForConditionalGeneration"]}, {}, 0, None),
        # A model that no record has, but whose owner knows better.
        ({"architectures": ["Newer"]}, {"limit_mm_per_prompt": {"image": 1}}, 1, None),
        (LLAMA, {"hf_overrides": {"architectures": VISION["architectures"]}}, 999, "<|vision"),
    ],
)
def test_models_are_known_by_their_architecture(
    config: dict[str, Any],
    arguments: dict[str, Any],
    count: int,
    placeholder: str | None,
    tmp_path: Path,
) -> None:
    abilities = VLLMFamily.open(vllm_engine(tmp_path, config=config, **arguments)).abilities
    assert abilities.images == count
    found = abilities.image_placeholder
    assert found is None if placeholder is None else (found or "").startswith(placeholder)


def test_images_take_the_places_of_their_placeholders(host: Running) -> None:
    one, other = image(size=(9, 8)), image(size=(7, 6))
    request = text("\x01,\x01", {"max_tokens": 40}, images=parts(one, other), stream=True)
    events = ask(host.engine, request)
    said = "".join(event.texts[0] for event in events)
    assert said.startswith(f"{told(one)}\x01,{told(other)}\x01")
    assert events[-1].input_token_count == len(told(one) + told(other)) + 3


def test_an_answer_has_the_room_that_images_leave(host: Running) -> None:
    data = image(size=(28 * 20, 28))
    asked = MAX_MODEL_LEN - len(PROMPT_IDS)
    answer = ask(host.engine, tokens(PROMPT_IDS, asked, images=parts(data)))
    expanded = 2 + len(told(data)) + 20
    assert len(token_ids(answer)) == MAX_MODEL_LEN - expanded
    assert answer[-1].finish == "length"


@pytest.mark.parametrize("kind", ["token ids", "text"])
def test_refusals_name_the_part(host: Running, kind: str) -> None:
    def refused(*files: bytes, prompt: bytes = b"\x01") -> Exception:
        images = parts(*files)
        if kind == "text":
            return failure(host.engine, text(prompt.decode(), images=images))
        return failure(host.engine, tokens([*prompt], images=images))

    for name in FORMATS:
        whole = image(name, (200, 200), 0x123456)
        error = refused(whole[: len(whole) * 2 // 3])
        assert isinstance(error, InvalidArgument), name
        assert "part 0: a broken image" in str(error)
    assert "part 1: a broken image" in str(refused(image(), b"GIF89a nothing of it"))
    assert "part 0: a broken image" in str(refused(bomb(64, 64)))
    long = refused(image(size=(2800, 2800)))
    assert isinstance(long, PromptTooLong)
    assert "images included" in str(long)
    assert "At most 2 image(s)" in str(refused(*[image()] * 3, prompt=b"\x01\x01\x01"))
    missing = refused(image(), image())
    assert isinstance(missing, InvalidArgument)
    assert "a placeholder for each of its 2 images" in str(missing)
    thin = refused(image(size=(4000, 10)))
    assert "part 0: not fit for this model: absolute aspect ratio must be smaller" in str(thin)
    ask(host.engine, tokens(PROMPT_IDS, images=parts(image())))  # it goes on


@pytest.mark.usefixtures("vllm_environment")
def test_a_model_of_text_that_is_asked_for_images_does_not_start(tmp_path: Path) -> None:
    words = r"takes no images .*\(LlamaForCausalLM\)"
    asked = running(tmp_path, config=LLAMA, limit_mm_per_prompt={"image": 1})
    with pytest.raises(InvalidPredictorConfig, match=words), asked:
        pass


@pytest.mark.usefixtures("vllm_environment")
def test_a_model_of_text_refuses_images(tmp_path: Path) -> None:
    with running(tmp_path) as host:
        error = failure(host.engine, tokens(PROMPT_IDS, images=parts(image())))
        assert isinstance(error, InvalidArgument)
        assert token_ids(ask(host.engine, tokens([*b"abc"]))) == [*b"abcab"]


def test_a_file_that_is_larger_than_its_header_says_is_refused() -> None:
    """As a GIF may be, whose frames have sizes of their own."""
    data = bytearray(image("GIF", (300, 300)))
    data[6:10] = b"\x10\0\x10\0"
    loaded: list[bytes] = []
    with pytest.raises(InvalidArgument, match="header says 16x16"):
        decode_images(parts(bytes(data)), loaded.append)
    assert loaded == []
