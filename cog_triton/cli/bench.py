"""``cog-triton bench``: measure a served model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from cog_triton.bench.options import (
    API,
    Arrival,
    Options,
    OutputMethod,
    TargetName,
    Unit,
    parse_lengths,
)
from cog_triton.system.terminal import coded_errors, err

_DEFAULT_DURATION_S = 30.0
_LOAD, _REQUESTS = "Load", "Requests"


def bench(
    target: Annotated[
        TargetName,
        typer.Option(metavar="API", help="cog-triton, triton or openai."),
    ] = TargetName.COG,
    url: Annotated[
        str | None,
        typer.Option("--url", "-u", help="Base URL.", show_default="PORT, 8080, 8000 here"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Of triton: ensemble, or tensorrt_llm directly; of openai, its name."),
    ] = None,
    unit: Annotated[
        Unit,
        typer.Option(
            metavar="UNIT",
            help="What --rate counts: rps (requests a second), batch (requests at once, again"
            " and again) or concurrency (users at once).",
            rich_help_panel=_LOAD,
        ),
    ] = Unit.RPS,
    rate: Annotated[float, typer.Option(help="Load, in --unit.", rich_help_panel=_LOAD)] = 1.0,
    duration: Annotated[
        float | None,
        typer.Option(
            help="Seconds to send for.",
            show_default="30, without --requests",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests to send at most.", rich_help_panel=_LOAD)
    ] = None,
    arrival: Annotated[
        Arrival,
        typer.Option(
            metavar="NAME", help="Of --unit rps: poisson or constant.", rich_help_panel=_LOAD
        ),
    ] = Arrival.POISSON,
    batch_pause: Annotated[
        float,
        typer.Option(help="Seconds between batches.", rich_help_panel=_LOAD),
    ] = 1.0,
    warmup: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Warm-up requests, not counted.", rich_help_panel=_LOAD
        ),
    ] = 1,
    seed: Annotated[
        int,
        typer.Option(help="Random seed of arrivals, lengths and prompts.", rich_help_panel=_LOAD),
    ] = 0,
    timeout: Annotated[
        float, typer.Option(help="Seconds for an answer.", rich_help_panel=_LOAD)
    ] = 600.0,
    n_input_tokens: Annotated[
        str,
        typer.Option(
            help="100, uniform:50-200, normal:100,20 or lognormal:100,0.5 (median, sigma).",
            rich_help_panel=_REQUESTS,
        ),
    ] = "100",
    n_output_tokens: Annotated[
        str | None,
        typer.Option(
            help="As --n-input-tokens.",
            show_default="128",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Directory with tokenizer.json: exact input lengths, not words.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    output_method: Annotated[
        OutputMethod | None,
        typer.Option(
            metavar="NAME",
            help="yield (streamed), wait (whole at the end), or of mock servers buffer (in"
            " pieces of --buffer-size).",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    buffer_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens a piece.", rich_help_panel=_REQUESTS),
    ] = None,
    tps: Annotated[
        float | None,
        typer.Option(
            help="Expected tokens a second of a stream; also sent to a mock server.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    api: Annotated[
        API,
        typer.Option(
            metavar="NAME", help="Of openai: chat or completions.", rich_help_panel=_REQUESTS
        ),
    ] = API.CHAT,
    stream: Annotated[
        bool,
        typer.Option("--stream/--no-stream", help="Ask for streams.", rich_help_panel=_REQUESTS),
    ] = True,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Ask for all of --n-output-tokens.",
            show_default="where the server can",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="NAME=VALUE to send with every request, as temperature=0; may be repeated.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="All metrics as JSON; - is stdout.", rich_help_panel="Output"),
    ] = None,
) -> None:
    """Measure a served model: latency and throughput.

    With --unit rps requests are sent when due, whether or not others are answered, and latency
    counts from then. Ctrl-C ends it early and reports the requests so far. Metrics are defined
    in docs/bench.md. Exit code 1 if nothing succeeded, 130 after Ctrl-C.

    Example: cog-triton bench --rate 8 --unit rps --duration 30

    Example: cog-triton bench --target openai --unit concurrency --rate 8
    """
    given = dict(locals())
    from cog_triton.bench import command

    with coded_errors():
        own = [field.name for field in dataclasses.fields(Options) if field.name in given]
        endless = duration is None and requests is None
        values = {name: given[name] for name in own} | {
            "url": url or command.default_url(target),
            "duration": _DEFAULT_DURATION_S if endless else duration,
            "input_lengths": parse_lengths("--n-input-tokens", n_input_tokens),
            "api_key": command.api_key(target),
            "inputs": command.parse_inputs(inputs or []),
        }
        if n_output_tokens:
            values["output_lengths"] = parse_lengths("--n-output-tokens", n_output_tokens)
        on_stderr = str(json_file) == "-"
        code = command.run(
            Options(**values),
            json_file,
            lambda text: typer.echo(text, nl=False, err=on_stderr),
            err,
        )
        if code:
            raise typer.Exit(code)
