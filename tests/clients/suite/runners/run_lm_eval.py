"""lm-eval: its command line with local tasks, by completions and chats; likelihoods by the mock."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

from checks import GIVEN, Server, check, main, server
from tokenizers import Tokenizer

HERE = server("openvino")
MOCK = server("mock")
WORK = Path(GIVEN["work"])
ROWS = [("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo")]
GENERATE = """
task: capitals_generate
output_type: generate_until
doc_to_text: "The capital of {{country}} is"
doc_to_target: "{{city}}"
generation_kwargs: {until: [".", "\\n", ","], max_gen_toks: 8, temperature: 0}
filter_list: [{name: stripped, filter: [{function: remove_whitespace}, {function: take_first}]}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """
task: capitals_choose
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: ["Paris", "Rome", "Tokyo"]
doc_to_target: "{{['Paris', 'Rome', 'Tokyo'].index(city)}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLL = """
task: capitals_roll
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "The capital of {{country}} is {{city}}."
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
"""
TASKS = WORK / "tasks"


def write_tasks() -> None:
    TASKS.mkdir(exist_ok=True)
    data = TASKS / "capitals.jsonl"
    rows = [json.dumps({"country": country, "city": city}) for country, city in ROWS]
    data.write_text("\n".join(rows) + "\n")
    source = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test"
    )
    for text in (GENERATE, CHOOSE, ROLL):
        name = text.split("\n")[1].removeprefix("task: ")
        (TASKS / f"{name}.yaml").write_text(f"{text}{source}\n")


def lm_eval(kind: str, here: Server, task: str, *flags: str, **options: Any) -> dict[str, Any]:
    """The task's results; fails with the last lines of the log."""
    path = "chat/completions" if "chat" in kind else "completions"
    values = {"model": here.model, "base_url": f"{here.openai}/{path}", "max_retries": 1, **options}
    output = WORK / "output"
    for old in output.rglob("*.json"):
        old.unlink()
    command = ["lm_eval", "run", "--model", kind, "--tasks", task, "--include_path", str(TASKS)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in values.items())]
    done = subprocess.run(
        [*command, "--output_path", str(output), *flags], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-1500:]
    (found,) = output.rglob("results*.json")
    return json.loads(found.read_text())["results"][task]


def matches(results: dict[str, Any]) -> float:
    (value,) = (v for k, v in results.items() if k.startswith("exact_match,"))
    return value


@check
def local_completions_generate() -> str:
    found = lm_eval(
        "local-completions", HERE, "capitals_generate", tokenizer=HERE.tokenizer, num_concurrent=2
    )
    assert matches(found) > 0.6, found
    return str(found)


@check
def local_completions_generate_from_texts_in_batches() -> None:
    found = lm_eval(
        "local-completions",
        HERE,
        "capitals_generate",
        *("--batch_size", "3"),
        tokenizer_backend="None",
    )
    assert matches(found) > 0.6, found


@check
def local_chat_completions_generate() -> str:
    flags = ("--apply_chat_template",)
    found = lm_eval("local-chat-completions", HERE, "capitals_generate", *flags)
    assert matches(found) >= 0
    return str(found)


@check
def multiple_choice_by_likelihood_with_the_mock() -> str:
    found = lm_eval(
        "local-completions", MOCK, "capitals_choose", tokenizer=MOCK.tokenizer, num_concurrent=4
    )
    assert found["acc,none"] == 1 / 3, found  # the shortest, Rome: each token has -1
    return str(found)


@check
def rolling_likelihood_with_the_mock() -> str:
    found = lm_eval(
        "local-completions", MOCK, "capitals_roll", tokenizer=MOCK.tokenizer, max_length=512
    )
    tokenizer = Tokenizer.from_file(f"{MOCK.tokenizer}/tokenizer.json")
    texts = [f"The capital of {country} is {city}." for country, city in ROWS]
    tokens = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    words = sum(len(text.split()) for text in texts)
    expected = math.exp(tokens / words)  # each token has -1
    assert math.isclose(found["word_perplexity,none"], expected), (found, expected)
    return str(found)


if __name__ == "__main__":
    write_tasks()
    main()
