"""``cog-triton bench``: measure a served model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from cog_triton.bench.options import (
    Lengths,
    Options,
    OutputMethod,
    TargetName,
    Unit,
    default_url,
    parse_inputs,
)
from cog_triton.system.terminal import err

_DEFAULT_DURATION_S = 30.0


def _option(text: str, panel: str | None = None, **fields: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **fields)


def _load(text: str, **fields: Any) -> Any:
    return _option(text, "Load", **fields)


def _requests(text: str, **fields: Any) -> Any:
    return _option(text, "Requests", **fields)


_URL = typer.Option("--url", "-u", help="Base URL.", show_default="PORT, 8080, 8000 here")
_INPUT = typer.Option(
    "--input",
    help="NAME=VALUE to send with every request, as temperature=0; may be repeated.",
    rich_help_panel="Requests",
)
_JSON = typer.Option("--json", help="All metrics as JSON; - is stdout.", rich_help_panel="Output")
_UNIT = (
    "What --rate counts: rps (requests a second), batch (requests at once, again"
    " and again) or concurrency (users at once)."
)


def bench(
    target: Annotated[TargetName, _option("cog-triton, triton or openai.", metavar="API")] = (
        TargetName.COG
    ),
    url: Annotated[str | None, _URL] = None,
    model: Annotated[
        str | None, _option("Of triton: ensemble, or tensorrt_llm directly; of openai, its name.")
    ] = None,
    unit: Annotated[Unit, _load(_UNIT, metavar="UNIT")] = Unit.RPS,
    rate: Annotated[float, _load("Load, in --unit.")] = 1.0,
    duration: Annotated[
        float | None, _load("Seconds to send for.", show_default="30, without --requests")
    ] = None,
    requests: Annotated[int | None, _load("Requests to send at most.")] = None,
    warmup: Annotated[int, _load("Warm-up requests, not counted.", min=0, metavar="N")] = 1,
    seed: Annotated[int, _load("Random seed of arrivals, lengths and prompts.")] = 0,
    timeout: Annotated[float, _load("Seconds for an answer.")] = 600.0,
    n_input_tokens: Annotated[str, _requests("100, or uniform:50-200.")] = "100",
    n_output_tokens: Annotated[str, _requests("As --n-input-tokens.")] = "128",
    output_method: Annotated[
        OutputMethod, _requests("yield (streamed) or wait (whole at the end).", metavar="NAME")
    ] = OutputMethod.YIELD,
    tps: Annotated[
        float | None, _requests("Tokens a second of a stream that a mock server is asked for.")
    ] = None,
    inputs: Annotated[list[str] | None, _INPUT] = None,
    json_file: Annotated[Path | None, _JSON] = None,
) -> None:
    """Measure a served model: latency and throughput.

    With --unit rps requests are sent when due, whether or not others are answered, and latency
    counts from then. Ctrl-C ends it early and reports the requests so far. Metrics are defined
    in docs/bench.md. Exit code 1 if nothing succeeded, 130 after Ctrl-C.

    Example: cog-triton bench --rate 8 --unit rps --duration 30

    Example: cog-triton bench --target openai --unit concurrency --rate 8
    """
    from cog_triton.bench import report

    options = Options(
        url=url or default_url(target),
        target=target,
        unit=unit,
        rate=rate,
        duration=_DEFAULT_DURATION_S if duration is None and requests is None else duration,
        requests=requests,
        warmup=warmup,
        seed=seed,
        timeout=timeout,
        input_lengths=Lengths.parse("--n-input-tokens", n_input_tokens),
        output_lengths=Lengths.parse("--n-output-tokens", n_output_tokens),
        tps=tps,
        output_method=output_method,
        model=model,
        api_key=os.environ.get("OPENAI_API_KEY") if target is TargetName.OPENAI else None,
        inputs=parse_inputs(inputs or []),
    )

    def say(text: str) -> None:
        typer.echo(text, nl=False, err=str(json_file) == "-")

    if code := report.run(options, json_file, say, err):
        raise typer.Exit(code)
