import math

import panel as pn
import pytest

from explorer import theme


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "tokens", "0 tokens"),
        (12, "blocks", "12 blocks"),
        (0.12345, "ms", "0.123 ms"),
        (12.345, "ms", "12.3 ms"),
        (37216.4, "ms", "37,216 ms"),
        (12345.6, "tokens/s", "12.3k tokens/s"),
        (1.5e9, "FLOP", "1.50 GFLOP"),
        (512, "B", "512 B"),
        (1234567, "B", "1.18 MiB"),
        (None, "ms", "–"),
        (math.nan, "%", "–"),
    ],
)
def test_number(value: float | None, unit: str, text: str) -> None:
    assert theme.number(value, unit) == text


def test_owners_keep_their_colours_and_differ() -> None:
    names = [f"test-owner-{i}" for i in range(6)]
    colours = [theme.owner_colour(name) for name in names]
    assert len(set(colours)) == 6
    assert [theme.owner_colour(name) for name in reversed(names)] == colours[::-1]


def test_those_who_are_here_differ_whoever_else_has_a_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theme, "_owners", {})
    monkeypatch.setattr(theme, "_present", set())
    theme.arrived("guest-1")
    first = theme.owner_colour("guest-1")
    for name in ("ann", "bob", "cem", "guest-4"):  # of a recorded run that somebody opened
        theme.owner_colour(name)
    for number in range(2, 6):
        theme.arrived(f"guest-{number}")
    theme.left("guest-2")
    gone = theme.owner_colour("guest-2")
    for number in range(6, 10):
        theme.arrived(f"guest-{number}")
    here = [theme.owner_colour(f"guest-{number}") for number in (1, *range(3, 10))]
    assert len(set(here)) == 8 and here[0] == first
    assert theme.owner_colour("guest-2") == gone


def test_more_people_than_colours_share_them_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theme, "_owners", {})
    monkeypatch.setattr(theme, "_present", set())
    monkeypatch.setattr(theme, "_OWNERS_KEPT", 12)
    for number in range(20):
        theme.arrived(f"guest-{number}")
    colours = [theme.owner_colour(f"guest-{number}") for number in range(20)]
    assert all(colours.count(colour) == 2 for colour in theme.OWNER_COLOURS)


def test_requests_of_one_owner_have_different_shades() -> None:
    assert len({theme.request_colour("test-owner-0", i) for i in range(4)}) == 4
    assert theme.mix("#000000", "#ffffff", 0.5) == "#808080"


def test_badges_carry_a_word_and_its_meaning() -> None:
    for kind in ("measured", "derived", "modelled", "replayed", "live", "what-if"):
        assert kind in theme.badge(kind) and "title=" in theme.badge(kind)
    with pytest.raises(ValueError, match=r"badge must be one of measured.*got 'guessed'"):
        theme.badge("guessed")


def test_texts_are_escaped() -> None:
    for markup in (theme.heading("<b>", hint="<script>"), theme.empty("<img onerror=x>")):
        assert "<b>" not in markup and "<script>" not in markup and "<img" not in markup


def test_a_panes_text_reaches_the_browser_and_so_does_everything_else() -> None:
    """Our pane sends its text by a shorter way than Panel's; the plain one says what is to come out."""
    made = [theme.pane("<i>first</i>"), pn.pane.HTML("<i>first</i>")]
    models = [one.get_root() for one in made]
    for one in made:
        one.object = "<b>a & b</b>"
        one.visible = False
    ours, plain = models
    assert ours.text == plain.text != "" and "first" not in ours.text
    assert (ours.visible, plain.visible) == (False, False)
