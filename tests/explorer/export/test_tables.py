"""Rows as CSV and Parquet: what is in the log is in the table, exactly."""

import csv
import io
import sys
from pathlib import Path

import pytest

from engine.events.log import EventLog
from engine.events.types import RequestAdded, StepDone, TokenSampled
from explorer.export.tables import TABLES, csv_bytes, parquet_bytes, write
from tests.engine.events.simulate import simulate


@pytest.fixture(scope="module")
def log() -> EventLog:
    log = EventLog()
    log.extend(simulate(60))
    return log


def read(log: EventLog, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_bytes(log, name).decode("utf-8"), newline="")))


def test_rows_are_what_the_log_holds(log: EventLog) -> None:
    steps = [e for e in log if isinstance(e, StepDone)]
    tokens = [e for e in log if isinstance(e, TokenSampled)]
    rows = read(log, "steps")
    assert [(int(r["step"]), float(r["forward_ms"]), int(r["num_tokens"])) for r in rows] == [
        (e.step, e.forward_ms, sum(run.num_tokens for run in e.runs)) for e in steps
    ]
    assert [(r["request_id"], int(r["token_id"]), float(r["logprob"]), r["text"]) for r in read(log, "tokens")] == [
        (e.request_id, e.token_id, e.logprob, e.text) for e in tokens
    ]
    assert len(read(log, "runs")) == sum(len(e.runs) for e in steps)
    assert [r["request_id"] for r in read(log, "requests")] == [e.request_id for e in log if isinstance(e, RequestAdded)]


def test_texts_keep_their_lines_and_formulas_are_none() -> None:
    events = simulate(20)
    at = next(i for i, e in enumerate(events) if isinstance(e, TokenSampled))
    texts = ['=HYPERLINK("x")', "a\nb", 'say "hi", twice', "@sum", "-1", "漢🙂", "\ud800"]
    fields = {f: getattr(events[at], f) for f in events[at].__struct_fields__}
    log = EventLog()
    log.extend([*events[:at], *(TokenSampled(**{**fields, "text": text, "index": i}) for i, text in enumerate(texts))])
    got = [r["text"] for r in read(log, "tokens")]
    assert got == ['\'=HYPERLINK("x")', "a\nb", 'say "hi", twice', "'@sum", "'-1", "漢🙂", "?"]


def test_unknown_names_and_endings_are_refused(log: EventLog, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="table must be one of requests, steps, runs, tokens"):
        csv_bytes(log, "blocks")
    with pytest.raises(ValueError, match=r"\.csv or \.parquet"):
        write(log, "steps", tmp_path / "steps.xlsx")
    write(log, "steps", tmp_path / "steps.csv")
    assert (tmp_path / "steps.csv").read_bytes() == csv_bytes(log, "steps")


def test_parquet_without_pyarrow_says_what_to_do(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        parquet_bytes(log, "steps")


@pytest.mark.parametrize("name", TABLES)
def test_parquet_holds_the_same_rows(log: EventLog, name: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(io.BytesIO(parquet_bytes(log, name)))
    assert table.column_names == list(TABLES[name].columns) and table.num_rows == len(read(log, name))
