"""JSON export of all metrics, and CSV export with a line for each request."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cog_triton import __version__
from cog_triton.bench.load_generator import RunResult
from cog_triton.bench.options import Options
from cog_triton.bench.request_record import Record
from cog_triton.bench.run_metrics import RunMetrics
from cog_triton.errors import InvalidArgument
from cog_triton.system.redaction import redact_address

SCHEMA = 1
_COLUMNS = (
    *("level", "index", "status", "code", "scheduled_s", "sent_s", "ttft_s", "e2el_s"),
    *("e2el_from_sending_s", "tpot_s", "input_tokens", "wanted_tokens", "output_tokens", "pieces"),
    *("server_ttft_s", "server_latency_s", "server_tps", "error"),
)


def as_json(options: Options, levels: Sequence[tuple[Options, RunMetrics]]) -> str:
    """JSON of the options, and of all metrics for each level of a sweep (or the one run)."""
    runs = [{"rate": own.rate, **_plain(asdict(measured))} for own, measured in levels]
    document = {
        "schema": SCHEMA,
        "cog_triton": __version__,
        "options": _plain({**asdict(options), "url": redact_address(options.url), "api_key": None}),
        "runs": runs,
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def as_csv(levels: Iterable[tuple[Options, RunResult]]) -> str:
    """CSV of requests; times in seconds, `scheduled_s` and `sent_s` from the start of the run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for options, run in levels:
        for record in run.records:
            writer.writerow(
                [
                    *(f"{options.rate:g}", record.index, record.status, record.code),
                    *map(_number, _times(record, run.started)),
                    *(
                        record.input_tokens,
                        record.wanted_tokens,
                        record.output_tokens,
                        record.pieces,
                    ),
                    *(record.server.get("time_to_first_token"), record.server.get("predict_time")),
                    *(record.server.get("tokens_per_second"), record.error),
                ]
            )
    return out.getvalue()


def write(option: str, path: Path, content: str | bytes) -> None:
    """Write `path`, ``-`` for stdout; raises E1005 naming the option where that fails."""
    data = content.encode() if isinstance(content, str) else content
    try:
        if str(path) == "-":
            sys.stdout.write(data.decode())
        else:
            path.write_bytes(data)
    except OSError as error:
        raise InvalidArgument(f"{option}={str(path)!r}: cannot be written: {error}") from error


def require_writable(option: str, path: Path | None) -> None:
    """Raise E1005 unless the directory of `path` exists: before measuring, not after."""
    if path is not None and str(path) != "-" and not path.absolute().parent.is_dir():
        raise InvalidArgument(f"{option}={str(path)!r}: its directory does not exist")


def _times(record: Record, started: float) -> list[float | None]:
    due = record.scheduled - started
    if not record.sent:  # interrupted before
        return [due, *[None] * 5]
    sent = record.sent - started
    return [due, sent, record.ttft, record.latency, record.service, record.tpot]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
