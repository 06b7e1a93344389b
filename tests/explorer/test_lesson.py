"""What the notebooks' cells show: both faces say the same, and the verdicts fall as they should."""

import pytest

from explorer import lesson


def test_a_table_says_where_its_numbers_come_from() -> None:
    shown = lesson.table(["step", "ms"], [[1, 2.5], [12, 1234.5]], kinds=("measured", "derived"), caption="Steps", bar="ms")
    assert repr(shown).splitlines() == ["Steps [measured, derived]", "step     ms", "   1   2.50", "  12  1,234"]
    page = shown._repr_html_()
    assert "● measured" in page and "∑ derived" in page and "width:100.0%" in page and "width:0.2%" in page
    assert page.count("<tr>") == 3 and "1,234" in page


def test_text_in_a_table_is_escaped() -> None:
    page = lesson.table(["<i>"], [["<script>alert(1)</script>"]], kinds="replayed", caption="<b>")._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page and "&lt;b&gt;" in page and "<th" in page and "<i>" not in page


def test_bars_survive_what_is_no_number() -> None:
    page = lesson.table(["ms"], [[float("nan")], [float("inf")], [-1.0], ["–"]], kinds="measured", bar="ms")._repr_html_()
    assert page.count("width:0.0%") == 3


@pytest.mark.parametrize(
    ("values", "side"),
    [
        ([1, 2.5], "right"),
        (["3,000", "12"], "right"),
        (["90 MiB", "45 KiB"], "right"),
        (["97%", "–"], "right"),
        (["9 / 3", 4], "right"),
        (["3 4 5 6", "0"], "left"),
        (["1.5e-04"], "right"),
        (["2 tokens"], "left"),
        (["", 1], "left"),
    ],
)
def test_numbers_stand_to_the_right(values: list, side: str) -> None:
    page = lesson.table(["x"], [[value] for value in values], kinds="measured")._repr_html_()
    assert page.count(f"text-align:{side}") == len(values) + 1 + (side == "left")  # the heading, and the caption is on the left


def test_a_table_without_rows() -> None:
    assert repr(lesson.table(["a", "b"], [], kinds="derived")).splitlines() == ["[derived]", "a  b"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kinds": "illustrative"}, "kinds must be of measured"),
        ({"kinds": ()}, "kinds must be of measured"),
        ({"kinds": ("measured", "live")}, "kinds must be of measured"),
        ({"bar": "seconds"}, "bar must be one of the columns step, ms"),
        ({"rows": [[1, 2, 3]]}, "each row needs 2 values"),
    ],
)
def test_a_bad_table_is_refused(change: dict, said: str) -> None:
    arguments = {"columns": ["step", "ms"], "rows": [[1, 2]], "kinds": "measured", **change}
    with pytest.raises(ValueError, match=said):
        lesson.table(**arguments)


@pytest.mark.parametrize(
    ("prediction", "measured", "said"),
    [
        (None, 20.1, "You made no prediction"),
        (..., 20.1, "You made no prediction"),
        (20, 20.1, "That is close"),
        (16.5, 20, "That is close"),
        (15.9, 20, "off by a factor of 1.26"),
        (512, 20.0, "off by a factor of 25.6"),
        (0, 20, "You predicted 0 times, measured here: 20 times."),
        (0, 0, "That is close"),
    ],
)
def test_a_prediction_is_compared(prediction: float | None, measured: float, said: str) -> None:
    shown = lesson.compare(prediction, measured, "times")
    assert said in repr(shown) and said in shown._repr_html_() and shown.passed is None
    assert str(20)[:2] in repr(shown) or measured == 0


@pytest.mark.parametrize("prediction", ["five", float("nan"), True])
def test_a_prediction_that_is_no_number_is_refused(prediction: object) -> None:
    with pytest.raises(ValueError, match="a prediction must be a number"):
        lesson.compare(prediction, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("got", "passed", "said"),
    [
        (None, False, "fill in the exercise"),
        (..., False, "fill in the exercise"),
        ([None, None], False, "fill in the exercise"),
        ([], False, "fill in the exercise"),
        ([8, 26], True, "✓ Right. One a step."),
        ([9, 27], False, "Not yet: got 9, 27. One too many."),
        ([8, None], False, "Not yet: got 8, None. Look again."),
        ("<b>", False, "Not yet: got <b>. Look again."),
        (["x" * 300], False, "x…. Look again."),
    ],
)
def test_an_answer_is_checked(got: object, passed: bool, said: str) -> None:
    shown = lesson.check(got, [8, 26], right="One a step.", hints=[([9, 27], "One too many.")], hint="Look again.")
    assert shown.passed is passed and said in repr(shown)
    assert "<b>." not in shown._repr_html_()
