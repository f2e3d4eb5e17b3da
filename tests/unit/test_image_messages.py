"""Images in messages: parts by name, and the forms that chat templates take them in."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import LLAMA_3, QWEN
from image_files import PARTS_TEMPLATE, part, user
from small_tokenizers import byte_level

from cog_triton.errors import BadMessages
from cog_triton.text import chat
from cog_triton.text.chat import ImageForm, ImageURL, image_form
from cog_triton.text.tokenizer import EngineTokenizer

# As those of some models: plain text is a list of characters to them.
ONLY_PARTS = (
    "{% for message in messages %}{{ message.role }}:"
    "{% for part in message.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
    "{% endfor %};{% endfor %}"
)
WRITES_THE_LIST = "{% for message in messages %}{{ message.content }}{% endfor %}"
REFUSES_LISTS = (
    "{% for m in messages %}{% if m.content is not string %}{{ raise_exception('text') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


def tokenizer(template: str | None) -> EngineTokenizer:
    return EngineTokenizer(byte_level(), chat_template=template)


@pytest.mark.parametrize(
    ("template", "placeholder", "expected"),
    [
        (PARTS_TEMPLATE, None, ImageForm(reads_parts=True)),
        (PARTS_TEMPLATE, "<image>", ImageForm(reads_parts=True)),
        (ONLY_PARTS, None, ImageForm(reads_parts=True, only_parts=True)),
        (QWEN, "<image>", ImageForm(placeholder="<image>")),
        (LLAMA_3, "<|image_{}|>", ImageForm(placeholder="<|image_{}|>")),
        (WRITES_THE_LIST, "<image>", ImageForm(placeholder="<image>")),
        (REFUSES_LISTS, "<image>", ImageForm(placeholder="<image>")),
        (QWEN, None, None),
        (WRITES_THE_LIST, None, None),
        ("nothing of it", "<image>", None),
        ("{{ broken", "<image>", None),
        (None, "<image>", None),
    ],
)
def test_the_form_is_found_by_rendering(
    template: str | None, placeholder: str | None, expected: ImageForm | None
) -> None:
    assert image_form(tokenizer(template), placeholder) == expected


@pytest.mark.parametrize(
    ("template", "placeholder", "expected"),
    [
        (PARTS_TEMPLATE, None, "system:Be.;user:a\x01b\x01;assistant:c;user:\x01;"),
        (ONLY_PARTS, None, "system:Be.;user:<image><image>ab;assistant:c;user:<image>;"),
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",
            "<{}>",
            "system:Be.;user:<1>\n<2>\na\nb;assistant:c;user:<3>;",
        ),
    ],
)
def test_images_are_written_as_the_template_takes_them(
    template: str, placeholder: str | None, expected: str
) -> None:
    image = part("data:,")
    messages = [
        user("a", image, "b", image),
        {"role": "assistant", "content": "c"},
        user(image),
    ]
    made = tokenizer(template)
    form = image_form(made, placeholder)
    assert form is not None
    urls: list[ImageURL] = []
    parsed = chat.parse_messages(messages, images=urls)
    assert [url.where for url in urls] == [
        "messages[0].content[1].image_url",
        "messages[0].content[3].image_url",
        "messages[2].content[0].image_url",
    ]
    assert chat.render_messages(parsed, "Be.", made, images=form).text == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url.url: must be text"),
        (part(7), "messages[0].content[0].image_url.url: must be text"),  # type: ignore[arg-type]
        ({"type": "image_url", "image_url": ["a"]}, "image_url.url: must be text"),
        (part("a", detail="big"), "image_url.detail='big': must be one of auto, low, high"),
        (part("a", detail=["low"]), "image_url.detail=['low']: must be one of"),
        ({"type": "image", "image": "a"}, "type='image': must be 'text' or 'image_url'"),
        ({"type": "input_audio"}, "type='input_audio': must be 'text' or 'image_url'"),
    ],
)
def test_wrong_parts_are_refused_by_name(content: Any, words: str) -> None:
    with pytest.raises(BadMessages) as caught:
        chat.parse_messages([user(content)], images=[])
    assert words in caught.value.detail
