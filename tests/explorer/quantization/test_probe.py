"""From error to token: the range of errors, what is asked for, and what is said of the answer."""

import json
import math

from explorer.mirror import Mirror
from explorer.quantization.probe import ProbePanel, computed_errors, recorded_errors, rounded_layers, verdict
from explorer.quantization.probe_figure import kl_html, texts_html
from tests.explorer.quantization import tabs as t


def test_recorded_errors_serve_their_own_method_only() -> None:
    event = t.layer_quantized()
    assert recorded_errors(event, "int4", 64).counts == event.error_counts
    assert recorded_errors(event, "int4", 32) is None and recorded_errors(event, "nf4", 64) is None
    found = computed_errors(t.matrix(), "nf4", 64)
    assert sum(found.counts) == 48 * 192 and found.low == -found.high and computed_errors(t.matrix(), "gptq", 64) is None


def test_what_was_rounded() -> None:
    assert rounded_layers([], 3) == {0, 1, 2} and rounded_layers(["4", "7.q_proj"], 30) == {4, 7}


def test_the_verdict_names_the_first_token_that_differs() -> None:
    said = verdict(t.probed())
    assert "884,736 numbers changed" in said and "Barcelona" in said and "1.31" in said
    assert "no token differs" in verdict(t.probed(first_difference=-1, margin=math.nan))


def test_texts_are_escaped() -> None:
    event = t.probed(token_texts=["<b>"] * 12, continuation=["<i>"], continuation_changed=["<u>"])
    assert "<b><b>" not in kl_html(event) and "<i>" not in texts_html(event).replace("<i style", "")


def test_a_range_of_one_matrix_is_asked_for() -> None:
    view = t.View()
    tab = ProbePanel(view)
    view.give(tab, t.started(), t.layer_quantized())
    assert tab.cut.visible and tab.between is None
    tab.range.value = (0, 8)
    tab.go.clicks += 1
    name, args, asked = view.session.calls[0]
    assert (name, args, asked["only"], asked["method"], asked["group_size"]) == (
        "probe_quantization",
        ("ann",),
        ["3.down_proj"],
        "int4",
        64,
    )
    assert asked["error_between"] == [-0.02, -0.02 + 8 * 0.04 / 64]
    view.give(tab, t.probed(asked["probe_id"]))
    assert tab.found.visible and "Barcelona" in tab.verdict.object and not tab.state.object
    text = json.dumps(Mirror(tab).spec())
    assert "NaN" not in text and "Infinity" not in text
