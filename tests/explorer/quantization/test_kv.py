"""The KV tab: outlier channels, how many tokens fit, what it asks for."""

import json

from explorer.mirror import Mirror
from explorer.quantization.kv import KvPanel, PoolFacts, channel_columns, dtypes, outliers
from tests.explorer.quantization import tabs as t


def test_outlier_channels_are_those_far_above_the_median() -> None:
    seen = t.kv_observed()
    found = outliers(channel_columns(seen.key_abs_max, seen.key_abs_mean, 64))
    assert {(h, c) for h, c, _t in found} == {(0, 20), (0, 52), (1, 6), (2, 22), (2, 54)}
    assert not outliers(channel_columns(seen.value_abs_max, seen.value_abs_mean, 64))


def test_tokens_that_fit_the_pool() -> None:
    rows = {d.name: d for d in dtypes(t.kv_observed(), PoolFacts("auto", 16, 16 * 23040, 512 * 16 * 23040))}
    assert rows["auto"].tokens == 512 * 16 and rows["auto"].key_error == 0
    assert rows["int4"].times == 23040 / 7200 and rows["int4"].tokens == 512 * 16 * 3.2


def test_a_layer_is_asked_for_once() -> None:
    view = t.View()
    tab = KvPanel(view)
    view.give(tab, t.started(), t.kv_observed(0))
    assert tab.layer.end == 29 and tab.channels.visible
    tab.layer.value = 7
    assert view.session.calls == [("observe_kv", ("ann", 7), {})]
    view.give(tab, t.kv_observed(7))
    tab.layer.value = 0
    assert len(view.session.calls) == 1
    text = json.dumps(Mirror(tab).spec())
    assert "NaN" not in text and "Infinity" not in text
