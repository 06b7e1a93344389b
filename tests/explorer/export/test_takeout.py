"""The Download menu: whatever goes wrong with a file is told to whoever asked for it."""

import logging
from typing import Any, NoReturn

import pytest

from explorer.export.takeout import TakeOut

ASKED = [
    "This run",
    "Trace",
    "Tables as CSV",
    "Tables as Parquet",
    "The whole run",
    "This page as HTML",
    "This page as a picture",
]


@pytest.mark.parametrize("label", ASKED)
@pytest.mark.parametrize(
    ("error", "told", "logged"),
    [
        (ValueError("no such step"), "no such step", 0),
        (OSError("the disk is full"), "the disk is full", 0),
        (ZeroDivisionError("by zero"), "The file could not be made: ZeroDivisionError: by zero", 1),
        (KeyError("block_size"), "The file could not be made: KeyError: 'block_size'", 1),
        (RuntimeError("it contradicts itself"), "The file could not be made: RuntimeError: it contradicts itself", 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_any_error_is_told(error: Exception, told: str, logged: int, label: str, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> NoReturn:
        raise error

    said: list[str] = []
    menu = TakeOut(lambda _replay: None, broken, said.append)
    (item,) = [each for each in menu.menu.items if each["label"].startswith(label)]
    with caplog.at_level(logging.ERROR):
        menu._chosen(item)
    assert said == [told]
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error] * logged


def test_what_is_no_item_of_the_menu_does_nothing() -> None:
    said: list[str] = []
    items: list[Any] = [None, "Trace", {}, {"label": 7}, {"label": "Everything"}]
    for item in items:
        TakeOut(lambda _replay: None, lambda: pytest.fail("asked"), said.append)._chosen(item)
    assert said == []
