"""A run as tables: requests, steps, runs (who did what in a step) and tokens; written as CSV or Parquet.

Columns carry their unit in the name (``step_ms``, ``kv_read_bytes``). Nothing is rounded. Parquet needs pyarrow, which Cutaway itself
does not: where it is missing, asking for Parquet is a ValueError that says so.
"""

import csv
import io
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from engine.events.log import EventLog
from engine.events.types import Event, StepDone, TokenSampled
from explorer.compare.transcript import Transcript
from explorer.i18n import _

Row = dict[str, Any]


class Table(NamedTuple):
    name: str
    what: str
    columns: tuple[str, ...]
    rows: Callable[[EventLog], Iterator[Row]]


def _requests(log: EventLog) -> Iterator[Row]:
    for t in Transcript.of(log).traces:
        yield {
            "request_id": t.request_id, "owner": t.owner, "arrived_step": t.arrived_step, "parent_id": t.parent_id or "",
            "sample_index": t.sample_index, "num_prompt_tokens": len(t.prompt_token_ids), "num_output_tokens": t.num_output_tokens,
            "num_preemptions": t.num_preemptions, "finish_reason": t.finish_reason or "", "message": t.message,
            "temperature": t.sampling.get("temperature"), "top_p": t.sampling.get("top_p"), "seed": t.sampling.get("seed"),
            "prompt_text": t.prompt_text,
        }  # fmt: skip


_STEP = (
    "step", "time_ns", "num_waiting", "num_running", "token_budget", "max_num_seqs", "used_blocks", "cached_free_blocks",
    "schedule_ms", "forward_ms", "sample_ms", "commit_ms", "step_ms", "record_ms", "flops", "weight_bytes", "kv_read_bytes",
    "kv_write_bytes",
)  # fmt: skip
_TOKEN = (
    "step", "time_ns", "request_id", "position", "index", "token_id", "text", "logprob", "rank", "u", "prob", "nucleus_size",
    "nucleus_mass", "entropy", "step_ms",
)  # fmt: skip


def _steps(log: EventLog) -> Iterator[Row]:
    for e in _of(log, StepDone):
        yield {**{name: getattr(e, name) for name in _STEP}, "num_tokens": sum(run.num_tokens for run in e.runs)}


def _runs(log: EventLog) -> Iterator[Row]:
    for e in _of(log, StepDone):
        for run in e.runs:
            yield {
                "step": e.step,
                **{name: getattr(run, name) for name in ("request_id", "phase", "start", "num_tokens", "sampled")},
            }


def _tokens(log: EventLog) -> Iterator[Row]:
    for e in _of(log, TokenSampled):
        yield {name: getattr(e, name) for name in _TOKEN}


def _of(log: EventLog, kind: type[Event]) -> Iterator[Any]:
    return (e for e in log if type(e) is kind)


TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Table("requests", _("One row a request: its prompt, its parameters, how it ended"), (
            "request_id", "owner", "arrived_step", "parent_id", "sample_index", "num_prompt_tokens", "num_output_tokens",
            "num_preemptions", "finish_reason", "message", "temperature", "top_p", "seed", "prompt_text",
        ), _requests),
        Table("steps", _("One row an engine step: its times, its batch, its bytes"), (*_STEP, "num_tokens"), _steps),
        Table("runs", _("One row for each request in each step"), ("step", "request_id", "phase", "start", "num_tokens", "sampled"), _runs),
        Table("tokens", _("One row a token: its draw, its probability, its rank"), _TOKEN, _tokens),
    )
}  # fmt: skip


def table(name: str) -> Table:
    if name not in TABLES:
        raise ValueError(f"table must be one of {', '.join(TABLES)}, got {name!r}")
    return TABLES[name]


def csv_bytes(log: EventLog, name: str) -> bytes:
    """One table as CSV (RFC 4180, UTF-8, a header line).

    A text that a spreadsheet would take for a formula (it begins with = + - @ or a control character) gets an apostrophe in front.
    """
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    chosen = table(name)
    writer.writerow(chosen.columns)
    for row in chosen.rows(log):
        writer.writerow([_cell(row[column]) for column in chosen.columns])
    return out.getvalue().encode("utf-8", "replace")


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def parquet_bytes(log: EventLog, name: str) -> bytes:
    """One table as Parquet. ValueError where pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            _("Parquet needs pyarrow, which is not installed here: pip install pyarrow. CSV works without.")
        ) from None
    chosen = table(name)
    rows = list(chosen.rows(log))
    columns = {column: [_plain(row[column]) for row in rows] for column in chosen.columns}
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


def _plain(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def write(log: EventLog, name: str, path: str | os.PathLike[str]) -> None:
    """Write one table; the ending of ``path`` (.csv or .parquet) says how. ValueError for another one."""
    ending = os.fspath(path).rsplit(".", 1)[-1].lower()
    makers = {"csv": csv_bytes, "parquet": parquet_bytes}
    if ending not in makers:
        raise ValueError(f"the path must end with .csv or .parquet, got {os.fspath(path)!r}")
    data = makers[ending](log, name)
    with open(path, "wb") as file:
        file.write(data)
