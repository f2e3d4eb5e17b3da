"""``cog-triton client``: send token ids to Triton's engine model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cog_triton.system.terminal import coded_errors, out

_DEFAULT_TEXT = "Born in north-east France, Soyer trained as a"


def client(
    url: Annotated[
        str, typer.Option("--url", "-u", help="Triton's HTTP endpoint.")
    ] = "http://localhost:8000",
    text: Annotated[str, typer.Option(help="What to go on from.")] = _DEFAULT_TEXT,
    input_ids: Annotated[
        str | None, typer.Option(help="Token ids instead of text, by comma.")
    ] = None,
    input_tokens_csv: Annotated[
        Path | None, typer.Option(help="Token ids instead of text: a CSV file's first row.")
    ] = None,
    tokenizer_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory with tokenizer.json.",
            show_default="ENGINE_DIR",
        ),
    ] = None,
    request_output_len: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 16,
    streaming: Annotated[
        bool, typer.Option("--streaming", "-S", help="Print token ids as they arrive.")
    ] = False,
    stop_after_ms: Annotated[
        int, typer.Option(min=0, metavar="N", help="Stop the engine after that many milliseconds.")
    ] = 0,
    stop_via_request_cancel: Annotated[
        bool,
        typer.Option(
            "--stop-via-request-cancel",
            help="Stop by closing the connection, not by a second request.",
        ),
    ] = False,
    beam_width: Annotated[
        int, typer.Option("--beam-width", "-b", min=1, metavar="N", help="Beams.")
    ] = 1,
    num_return_sequences: Annotated[
        int | None,
        typer.Option("--num-return-sequences", "-n", min=1, metavar="N", help="Sequences."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from that many; 1 is greedy.")] = 1,
    top_p: Annotated[float, typer.Option(help="Sample from this share of probability.")] = 0.0,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is neutral.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="0 is neutral.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="0 is neutral.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling.")] = None,
    end_id: Annotated[
        int | None, typer.Option(help="Token that ends; -1 for none.", show_default="tokenizer's")
    ] = None,
    pad_id: Annotated[
        int | None, typer.Option(help="Padding token.", show_default="engine's")
    ] = None,
    exclude_input_in_output: Annotated[
        bool, typer.Option("--exclude-input-in-output", help="Ask for generated tokens alone.")
    ] = False,
    request_id: Annotated[str, typer.Option(help="Id of the request, in Triton's log.")] = "",
    model_name: Annotated[str, typer.Option(help="Triton's model.")] = "tensorrt_llm",
    stream_timeout: Annotated[
        float,
        typer.Option(
            "--stream-timeout", "-t", min=0.001, metavar="N", help="Seconds without a byte."
        ),
    ] = 120.0,
) -> None:
    """Send token ids to Triton's engine model, and print output_ids, input and output.

    Options are those of TensorRT-LLM's inflight_batcher_llm_client.py, over HTTP.

    Example: cog-triton client --request-output-len 200 --tokenizer-dir engine --stop-after-ms 200
    """
    from cog_triton.triton import token_client

    with coded_errors():
        ids = None
        if input_tokens_csv is not None:
            ids = token_client.read_ids(input_tokens_csv)
        elif input_ids is not None:
            ids = token_client.parse_ids("--input-ids", input_ids.split(","))
        prompt = token_client.load_prompt(ids, text, tokenizer_dir)
        sampling = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "seed": seed,
        }
        request = token_client.TokenRequest(
            input_ids=prompt.ids,
            output_len=request_output_len,
            sampling={name: value for name, value in sampling.items() if value is not None},
            beam_width=beam_width,
            return_sequences=num_return_sequences,
            end_id=prompt.end_id if end_id is None else end_id,
            pad_id=pad_id,
            streaming=streaming,
            exclude_input=exclude_input_in_output,
            stop_after_ms=stop_after_ms,
            stop_by_disconnect=stop_via_request_cancel,
            request_id=request_id,
            model=model_name,
        )
        token_client.send_and_print(
            url, stream_timeout, prompt, request, lambda line: out.print(line, markup=False)
        )
