"""The searches: equal to the engine's own, step by step; and the tab that plays them."""

import json
import time

import msgspec
import numpy as np
import pytest
import torch

from engine.quantization.calibration import output_error
from engine.quantization.gptq import quantize_gptq
from engine.quantization.intn import quantize_int
from explorer.mirror import Mirror
from explorer.quantization.search import SearchPanel, arrays, search
from tests.explorer.quantization import tabs as t

EVENT = t.matrix(rows=24, columns=96)


def test_rows_are_exactly_what_the_whole_matrix_gives() -> None:
    weight, calibration = arrays(EVENT)
    run = search(EVENT, 3, 32, rows=8).gptq
    whole = quantize_gptq(weight, calibration, 3, 32).dequantize()
    assert np.allclose(weight[:8].numpy() + run.change(96, 8, 0, 96), whole[:8].numpy(), atol=2e-5)
    relative = (output_error(weight[:8] - whole[:8], calibration) / output_error(weight[:8], calibration)) ** 0.5
    assert run.gptq[-1] == pytest.approx(100 * relative, rel=1e-3)
    plain = quantize_int(weight[:8], 3, 32).dequantize()
    relative = (output_error(weight[:8] - plain, calibration) / output_error(weight[:8], calibration)) ** 0.5
    assert run.plain[-1] == pytest.approx(100 * relative, rel=1e-3)
    assert run.gptq[-1] < run.plain[-1]


def test_a_step_moves_only_the_columns_to_come() -> None:
    run = search(EVENT, 4, 32).gptq
    moved = run.moved(10)
    assert not moved[:10].any() and moved[10:].any() and not run.moved(0).any()
    before, after = (run.change(i, 24, 0, 96) for i in (9, 10))
    assert np.allclose(np.linalg.norm((after - before)[:, 10:], axis=0), moved[10:], atol=1e-5)


def test_awq_is_never_worse_than_exponent_0() -> None:
    found = search(EVENT, 3, 32)
    assert found.ratio[0] == 1 and found.ratio[found.best] == found.ratio.min() < 1


def test_bytes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not make"):
        arrays(msgspec.structs.replace(EVENT, weight=b"123"))
    assert torch.is_tensor(arrays(EVENT)[0])


def test_the_tab_computes_beside_the_page_and_plays() -> None:
    view = t.View()
    tab = SearchPanel(view)
    view.give(tab, t.started())
    tab.fetch.clicks += 1
    assert view.session.calls == [("observe_matrix", ("ann", 3, "down_proj"), {})]
    view.give(tab, EVENT)
    deadline = time.monotonic() + 20
    while not tab.gptq_part.visible and time.monotonic() < deadline:
        time.sleep(0.02)
        tab.update()
    assert tab.gptq_part.visible and tab.step.end == 96
    tab.play.clicks += 1
    for _i in range(3):
        tab.update()
    assert tab.step.value == 3 and "Column <b>2</b>" in tab.now.object
    text = json.dumps(Mirror(tab).spec())
    assert "NaN" not in text and "Infinity" not in text
