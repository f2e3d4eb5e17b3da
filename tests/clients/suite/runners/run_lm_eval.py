"""lm-eval: its command line with local tasks, by completions and chats; likelihoods by the mock."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from checks import GIVEN, Server, check, main, run, server

HERE, MOCK = server("openvino"), server("mock")
WORK = Path(GIVEN["work"])
TASKS = WORK / "tasks"
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


def write_tasks() -> None:
    TASKS.mkdir(exist_ok=True)
    data = TASKS / "capitals.jsonl"
    rows = [json.dumps({"country": country, "city": city}) for country, city in ROWS]
    data.write_text("\n".join(rows) + "\n")
    source = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test"
    )
    for text in (GENERATE, CHOOSE):
        name = text.split("\n")[1].removeprefix("task: ")
        (TASKS / f"{name}.yaml").write_text(f"{text}{source}\n")


def lm_eval(kind: str, here: Server, task: str, *flags: str, **options: Any) -> dict[str, Any]:
    """The task's results."""
    path = "chat/completions" if "chat" in kind else "completions"
    values = {"model": here.model, "base_url": f"{here.openai}/{path}", "max_retries": 1, **options}
    arguments = ",".join(f"{name}={value}" for name, value in values.items())
    output = WORK / "output"
    shutil.rmtree(output, ignore_errors=True)
    run(
        *("lm_eval", "run", "--model", kind, "--tasks", task, "--include_path", TASKS),
        *("--model_args", arguments, "--output_path", output, *flags),
    )
    (found,) = output.rglob("results*.json")
    return json.loads(found.read_text())["results"][task]


@check
def local_completions_generate() -> None:
    found = lm_eval(
        "local-completions", HERE, "capitals_generate", tokenizer=HERE.tokenizer, num_concurrent=2
    )
    assert found["exact_match,stripped"] > 0.6, found


@check
def local_chat_completions_generate() -> None:
    found = lm_eval("local-chat-completions", HERE, "capitals_generate", "--apply_chat_template")
    assert found["exact_match,stripped"] >= 0, found


@check
def multiple_choice_by_likelihood_with_the_mock() -> None:
    found = lm_eval(
        "local-completions", MOCK, "capitals_choose", tokenizer=MOCK.tokenizer, num_concurrent=4
    )
    assert found["acc,none"] == 1 / 3, found  # the shortest, Rome: each token has -1


if __name__ == "__main__":
    write_tasks()
    main()
