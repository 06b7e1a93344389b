import param
import pytest

from explorer.url import Url, format_query, integer, parse_query, read_param, write_param


class Knobs(param.Parameterized):
    share = param.Number(default=0.5, bounds=(0, 1))
    count = param.Integer(default=4)
    on = param.Boolean(default=False)
    kind = param.Selector(default="a", objects=["a", "b c"])
    text = param.String(default="")


def test_a_query_survives_the_round_trip() -> None:
    values = {"page": "kv-cache", "step": 12, "request": "req-1#2 & <b>ü</b>", "on": True}
    assert parse_query(format_query(values)) == {"page": "kv-cache", "step": "12", "request": "req-1#2 & <b>ü</b>", "on": "1"}


def test_nothing_to_say_is_an_empty_query() -> None:
    assert format_query({"page": None}) == ""
    assert parse_query("") == parse_query("?page=") == {}


@pytest.mark.parametrize("search", ["?" + "a=1&" * 100_000, "?%ff%fe=%zz", "?=&=&", "?page[]=1", "\x00", "?a=1;b=2"])
def test_whatever_a_visitor_types_is_a_dict(search: str) -> None:
    assert isinstance(parse_query(search), dict)


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("0", 0), ("-1", None), ("1e5", None), ("", None), (None, None), ("٣", None), ("9" * 40, None)],
)
def test_integer(text: str | None, value: int | None) -> None:
    assert integer(text) == value


def test_what_if_knobs_travel_and_only_when_they_were_moved() -> None:
    knobs, other = Knobs(share=0.25, count=7, on=True, kind="b c", text="x&y"), Knobs()
    names = ["share", "count", "on", "kind", "text"]
    query = parse_query(format_query({name: write_param(knobs, name) for name in names}))
    for name in names:
        read_param(other, name, query[name])
    assert [getattr(other, name) for name in names] == [0.25, 7, True, "b c", "x&y"]
    assert all(write_param(Knobs(), name) is None for name in names)


@pytest.mark.parametrize(
    ("name", "text"), [("share", "2"), ("share", "nan-sense"), ("count", "1.5"), ("kind", "no such"), ("count", None)]
)
def test_a_value_that_the_knob_does_not_take_is_its_default(name: str, text: str | None) -> None:
    knobs = Knobs(share=0.25, count=7, kind="b c")
    read_param(knobs, name, text)
    assert getattr(knobs, name) == knobs.param[name].default


def test_the_browser_tells_where_it_arrived() -> None:
    places = []
    url = Url(places.append)
    url.action = {"seq": 1, "kind": "arrived", "search": "?page=run", "width": 390}
    url.action = {"seq": 2, "kind": "__init__"}
    assert [place["search"] for place in places] == ["?page=run"]


def test_what_is_written_says_which_action_it_answers() -> None:
    url = Url(lambda action: None)
    url.write("?a=1")
    assert url.target == {"search": "?a=1", "push": False, "seen": 0}
    url.action = {"seq": 4, "kind": "arrived", "search": "?b=2"}
    url.write("?b=2")
    url.action = {"seq": "x", "kind": "arrived"}
    url.write("?c=3", push=True)
    assert url.target == {"search": "?c=3", "push": True, "seen": 4}
