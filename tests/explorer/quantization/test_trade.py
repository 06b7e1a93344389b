"""The trade: points, deltas, the case that an average hides, and what the tab asks for."""

import json
import math

from explorer.mirror import Mirror
from explorer.quantization.trade import TradePanel, baseline_of, hidden_loss, merged, point_of
from explorer.quantization.trade_figure import axis, drawn
from tests.explorer.quantization import tabs as t


def test_a_second_measurement_takes_the_place_of_the_first() -> None:
    first, again = point_of(t.quality("int4", 32)), point_of(t.quality("int4", 32, kl_mean=0.5))
    points = merged([point_of(t.quality()), first], [again])
    assert [p.kl_mean for p in points] == [0.0, 0.5]
    assert baseline_of(points).method == "" and baseline_of(points, again.key) is again


def test_the_loss_that_perplexity_hides() -> None:
    base, lossy = point_of(t.quality()), point_of(t.quality("int4", 128))
    point, factor, probe, before, after = hidden_loss([base, lossy], base)
    assert (point, probe, before, after) == (lossy, "arithmetic", 0.52, 0.36) and math.isclose(factor, 23 / 21.4)
    assert hidden_loss([base, point_of(t.quality("int2", 32))], base) is None  # there perplexity says it


def test_an_axis_holds_its_values() -> None:
    for values in ([21.4, 22.0, 23.0], [0.0, 0.001, 6.0], [20.0, 9000.0], [0.0]):
        logarithmic, low, high, ticks = axis(values)
        assert all(low <= drawn(v, logarithmic, ticks) <= high for v in values) and len(ticks) >= 2
    assert axis([0.0, 0.001, 6.0])[0] and not axis([21.0, 22.0])[0]


def test_the_tab_measures_and_pins() -> None:
    view = t.View()
    tab = TradePanel(view)
    view.give(tab, t.started(), t.weights())
    tab.measure.clicks += 1
    assert view.session.calls == [("measure_quality", ("ann",), {})]
    view.give(tab, t.progress())
    assert tab.measure.disabled and "5 / 20" in tab.state.object
    view.give(tab, t.quality(), t.quality("int4", 32))
    assert not tab.measure.disabled and tab.drawn.visible
    assert "× 0.312" in tab.rows.object
    tab.base.value = "1"
    tab.update()
    assert "× 3.200" in tab.rows.object
    text = json.dumps(Mirror(tab).spec())
    assert "NaN" not in text and "Infinity" not in text


def test_a_saved_run_offers_no_measurement() -> None:
    view = t.View(live=False)
    tab = TradePanel(view)
    view.give(tab, t.started())
    assert "nobody measured" in tab.nothing.object and "Measure what runs now" not in json.dumps(Mirror(tab).spec())
