from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, byte_level

from cog_triton.errors import (
    BadMessages,
    BadPromptTemplate,
    PromptRequired,
    PromptTemplateError,
)
from cog_triton.text.chat_template import render_chat
from cog_triton.text.prompts import RenderedPrompt, render
from cog_triton.text.tokenizer import EngineTokenizer

CHATML = """{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
LLAMA = """{{ bos_token }}{% for m in messages %}
{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
{% endif %}
{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}"""

PLAIN = EngineTokenizer(byte_level())
CHAT = EngineTokenizer(byte_level(), chat_template=CHATML)
LLAMA_CHAT = EngineTokenizer(byte_fallback(), chat_template=LLAMA, bos_token="<s>")


def rendered(
    prompt: str = "Hi",
    system_prompt: str | None = None,
    request: str | None = None,
    default: str | None = None,
    tokenizer: EngineTokenizer = PLAIN,
) -> RenderedPrompt:
    return render(
        prompt,
        system_prompt,
        request_template=request,
        default_template=default,
        tokenizer=tokenizer,
    )


def test_the_request_goes_first_then_the_default_then_the_chat_template_then_the_prompt() -> None:
    assert rendered(request="R {prompt}", default="D {prompt}", tokenizer=CHAT).text == "R Hi"
    assert rendered(default="D {prompt}", tokenizer=CHAT).text == "D Hi"
    chat = rendered(tokenizer=CHAT)
    assert chat.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert not chat.add_special_tokens
    assert rendered() == RenderedPrompt("Hi", add_special_tokens=True)


def test_both_fields_are_filled_in_and_doubled_braces_are_single() -> None:
    template = '{system_prompt}: {{"q": "{prompt}", "again": "{prompt}"}}'
    text = rendered(system_prompt="Sys", request=template).text
    assert text == 'Sys: {"q": "Hi", "again": "Hi"}'
    assert rendered(system_prompt=None, request="[{system_prompt}]{prompt}").text == "[]Hi"


@given(st.text("{}ab!:0\n", min_size=1), st.text("{}ab!:0\n"))
def test_prompt_text_is_never_interpreted(prompt: str, system_prompt: str) -> None:
    text = rendered(f"p{prompt}", system_prompt, request="<{system_prompt}|{prompt}>").text
    assert text == f"<{system_prompt}|p{prompt}>"
    chat = rendered(f"p{prompt}%{{{{ 1 }}}}", system_prompt, tokenizer=CHAT).text
    assert f"\np{prompt}%{{{{ 1 }}}}<|im_end|>" in chat


@pytest.mark.parametrize("field", ["{foo}", "{prompt:>9}", "{prompt!r}", "{"])
def test_a_template_with_another_field_or_format_is_refused(field: str) -> None:
    with pytest.raises(PromptTemplateError, match=r"E1004 .*PROMPT_TEMPLATE"):
        rendered(default=f"{{prompt}} {field}")


@pytest.mark.parametrize("template", ["", "fixed", "{{prompt}}", "{system_prompt}"])
def test_a_template_that_would_lose_the_prompt_is_refused(template: str) -> None:
    with pytest.raises(BadPromptTemplate, match=r"E1003 .*prompt_template has no {prompt}"):
        rendered(request=template)


@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT])
@pytest.mark.parametrize("template", [None, " {system_prompt} {prompt}\n"])
def test_a_blank_prompt_is_refused_unless_the_template_needs_none(
    tokenizer: EngineTokenizer, template: str | None
) -> None:
    with pytest.raises(PromptRequired, match="E1001"):
        rendered("\n\t ", request=template, tokenizer=tokenizer)
    assert rendered("", request="Tell me a story.").text == "Tell me a story."


@pytest.mark.parametrize(
    ("request_template", "template", "culprit"),
    [
        ("{prompt}", CHATML, "prompt_template"),
        (None, None, "no prompt template"),
        (None, "{{ messages[-1].content }}", "chat template"),
    ],
)
def test_an_unused_system_prompt_gives_a_warning_without_its_text(
    request_template: str | None, template: str | None, culprit: str
) -> None:
    tokenizer = EngineTokenizer(byte_level(), chat_template=template)
    result = rendered(system_prompt="secret", request=request_template, tokenizer=tokenizer)
    assert result.text == "Hi"
    (warning,) = result.warnings
    assert warning.startswith("system_prompt is not used")
    assert culprit in warning
    assert "secret" not in warning


def test_a_refused_system_prompt_is_named_as_the_cause() -> None:
    with pytest.raises(BadMessages, match=r"System role not supported; .*takes no system prompt"):
        rendered("hello", "Be brief.", tokenizer=LLAMA_CHAT)


CALL = {
    "id": "a1",
    "type": "function",
    "function": {"name": "f", "arguments": {"b": "é", "a": [1]}},
}
AGENTS: list[dict[str, object]] = [
    {"role": "user", "content": "<é&>"},
    {"role": "assistant", "content": "", "reasoning_content": " Hm\n", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a1", "content": "<think>no</think>x"},
]
OF_CALL = "{% set args = messages[1].tool_calls[0].function.arguments %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é&>"}'),
        ("{{ ['é'] | tojson(ensure_ascii=False) }}", '["é"]'),  # GLM, MiniMax, Kimi, Step
        (r"{{ ['é'] | tojson(true) }}", r'["\u00e9"]'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        (OF_CALL + "{{ args | tojson(separators=(',', ':')) }}", '{"b":"é","a":[1]}'),  # Kimi
        (OF_CALL + "{{ args | tojson(sort_keys=true) | string }}", '{"a": [1], "b": "é"}'),
        ("{{ strftime_now('%Y') if strftime_now is defined }}", f"{datetime.now():%Y}"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% for i in [1, 2] %}{% if i < 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "2"),
        ("a{% generation %}{{ messages[0].role }}{% endgeneration %}b", "auserb"),
        ("a {%- generation -%} b {%- endgeneration -%} c", "abc"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ eos_token }}{{ bos_token }}|", "|"),
        (  # GLM: the last question is looked for, and content may be parts
            "{% macro text(c) %}{% if c is string %}{{ c }}{% elif c is iterable and c is not"
            " mapping %}{{ c[0].text }}{% endif %}{% endmacro %}{% set ns = namespace(last=-1) %}"
            "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
            "{% endif %}{% endfor %}"
            "{{ ns.last ~ text(messages[0].content) }}{{ text([{'text': 1}]) }}",
            "0<é&>1",
        ),
        (  # Qwen 3: from the end, and reasoning in either place
            "{% for m in messages[::-1] %}{% set r = m.reasoning_content.strip() if"
            " m.reasoning_content is string else m.content.split('</think>')[0].split('<think>')"
            "[-1].lstrip('n') %}{{ r }},{% endfor %}",
            "o,Hm,<é&>,",
        ),
        (  # Qwen 3.5, Kimi: tool messages of one turn belong together
            "{% for m in messages if m.role == 'tool' %}{{ '(' if loop.first or"
            " loop.previtem.role != 'tool' }}{{ m.content.endswith('x') }}{{ ')' if loop.last or"
            " loop.nextitem.role != 'tool' }}{{ m.tool_call_id[-9:] }}{% endfor %}",
            "(True)a1",
        ),
        (  # GLM, MiniMax, Qwen 3 Coder, Gemma 4: arguments one by one
            OF_CALL
            + "{% for k, v in args.items() %}{{ k }}={{ v if v is string else v | tojson }};"
            "{% endfor %}{% for k, v in args | dictsort %}{{ k | upper }}{% endfor %}"
            "{% for k, v in args | items if v is sequence and v is not string %}"
            "{{ k }}{% endfor %}",
            "b=é;a=[1];ABa",
        ),
        (  # Mistral, Llama, DeepSeek, Granite: lists of messages, and what may be missing
            "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages |"
            " rejectattr('tool_calls', 'defined') | map(attribute='role') | join('+') }}"
            "{{ (messages + [{'role': 'x'}])[1:][-1].get('role', '') | default('') | trim }}"
            "{{ (tools or 'no') ~ (thinking | default(false)) ~ (x is not defined) }}",
            "1user+toolxnoFalseTrue",
        ),
    ],
)
def test_templates_have_what_hugging_face_gives_them(template: str, expected: str) -> None:
    tokenizer = EngineTokenizer(byte_level(), chat_template=template + "{# tool_calls #}")
    assert render_chat(AGENTS, tokenizer) == expected
