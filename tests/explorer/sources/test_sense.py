"""Saved runs whose values are of their types and make no sense: refused when they are opened, with a name and what was got."""

from pathlib import Path
from typing import Any

import pytest

from engine.events.log import EventLog
from engine.events.types import EngineStarted, Event, RequestAdded
from explorer.replay import Replay
from explorer.runs import SHIPPED
from explorer.sources.opening import open_source
from explorer.sources.sense import CONFIG, MODEL, check_sampling
from explorer.store import EventStore
from tests.engine.events.simulate import simulate


def changed(event: Event, **fields: Any) -> Any:
    return type(event)(**{**{name: getattr(event, name) for name in event.__struct_fields__}, **fields})


def saved(path: Path, events: list[Event]) -> Path:
    log = EventLog()
    log.extend(events)
    log.save(path)
    return path


def with_engine(path: Path, what: str, name: str, value: Any) -> Path:
    first, *events = simulate(10)
    assert isinstance(first, EngineStarted)
    return saved(path, [changed(first, **{what: {**getattr(first, what), name: value}}), *events])


def refused(path: Path) -> str:
    """The message; the same however the file is opened, but for the name that it is known by."""
    with pytest.raises(ValueError) as caught:
        EventStore.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    with pytest.raises(ValueError) as again:
        open_source(path)
    assert str(again.value) == message
    with pytest.raises(ValueError) as shown:
        Replay.of_file("mine", path)
    assert str(shown.value) == message.replace(str(path), "mine")
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("what", "name", "value"),
    [
        ("config", "block_size", 0), ("config", "max_model_len", "many"), ("config", "max_num_seqs", True),
        ("config", "max_num_batched_tokens", 1.5), ("model", "vocab_size", -1), ("model", "num_layers", [4]), ("model", "hidden_size", 1 << 60),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_be(what: str, name: str, value: Any, tmp_path: Path) -> None:
    assert (
        refused(with_engine(tmp_path / "run", what, name, value))
        == f"{what}.{name} must be a whole number from 1 on, got {value!r}"
    )


@pytest.mark.parametrize("name", ["kv_bytes_per_block", "kv_pool_bytes"])
def test_a_pool_of_less_than_nothing(name: str, tmp_path: Path) -> None:
    first, *events = simulate(10)
    assert f"{name} must be a whole number from 0 on, got -1" == refused(
        saved(tmp_path / "run", [changed(first, **{name: -1}), *events])
    )


@pytest.mark.parametrize("sampling", [{"temperature": [1]}, {"top_p": 7.0}, {"max_tokens": 0}, {"no_such_parameter": 1}])
def test_a_request_that_no_engine_takes(sampling: dict[str, Any], tmp_path: Path) -> None:
    events = simulate(40)
    at = next(i for i, event in enumerate(events) if isinstance(event, RequestAdded))
    events[at] = changed(events[at], sampling=sampling)
    message = refused(saved(tmp_path / "run", events))
    assert message.startswith(f"request {events[at].request_id}: ") and next(iter(sampling)) in message


def test_what_is_not_known_is_not_wrong(tmp_path: Path) -> None:
    for name in CONFIG:
        EventStore.load(with_engine(tmp_path / "run", "config", name, None))
    for name in MODEL:
        EventStore.load(with_engine(tmp_path / "run", "model", name, None))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_runs_make_sense_to_their_end(name: str) -> None:
    store = EventStore.load(SHIPPED[name].path)
    check_sampling((event.request_id, event.sampling) for event in store.log if isinstance(event, RequestAdded))
