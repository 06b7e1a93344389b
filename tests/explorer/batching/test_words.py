"""What the page says of measures, loads and settings."""

import math

import pytest

from engine.load.generate import conversations
from engine.measures import Limits, RequestRecord, measure
from explorer.batching import words
from explorer.batching.load_settings import ARRIVALS, SHAPES, Settings, lengths, to_load
from explorer.batching.rows import LoadRun
from explorer.sources.loads import LoadState

HOSTILE = "<script>alert(1)</script>"


def run(*times: float, arrival: float = 0.0) -> RequestRecord:
    record = RequestRecord("r", arrival, 10, finish_s=times[-1], outcome="length", scheduled_s=arrival + 0.1)
    record.token_times_s.extend(times)
    return record


def test_a_duration_reads_as_a_person_says_it() -> None:
    assert [words.ms(v) for v in (math.nan, 0.00123, 0.0456, 0.25, 3.2, 12.0)] == [
        "–",
        "1.23 ms",
        "45.6 ms",
        "250 ms",
        "3,200 ms",
        "12.0 s",
    ]


@pytest.mark.parametrize(("a", "b", "text"), [(2.0, 1.0, "× 0.50"), (1.0, 2.0, "× 2.00"), (1.0, 1.2, "+20 %"), (1.0, 0.75, "-25 %"), (3.0, 3.0, "="), (0.0, 1.0, "–"), (math.nan, 1.0, "–")])  # fmt: skip
def test_b_against_a(a: float, b: float, text: str) -> None:
    assert words.delta(a, b) == text


def test_the_table_says_which_is_better() -> None:
    slow, fast = measure([run(1.0, 2.0, 3.0)]), measure([run(0.5, 1.0, 1.5)])
    table = words.compared_html(slow, fast, "static", HOSTILE)
    rows = {row.split("</td>")[0].split(">")[-1]: row for row in table.split("<tr")[2:]}
    assert "▲ better" in rows["TTFT p50"] and "× 0.50" in rows["TTFT p50"]
    assert "▲ better" in rows["Output tokens/s"] and "× 2.00" in rows["Output tokens/s"]
    assert "better" not in rows["In the batch, mean"] and HOSTILE not in table
    assert "▼ worse" in words.compared_html(fast, slow, "a", "b")
    assert words.verdict(slow, fast, "static", "continuous").startswith(
        "The same requests took 3.0 s under A (static) and 1.5 s under B"
    )


def test_goodput_has_the_limits() -> None:
    records = [run(1.0, 1.1), run(3.0, 3.1)]
    good = {title: value for title, value, _below, _hint in words.tiles(measure(records, limits=Limits(ttft_s=2.0)))}
    assert good["Goodput"] == f"{1 / 3.1:.2f} req/s"
    assert "1 kept" not in words.tiles_html(measure(records))


def test_a_loads_state_in_words() -> None:
    state = LoadState("load1", 40, 20, 12, 3, 5, 1, 4.0, 7.9, False, False, HOSTILE)
    text = words.load_html(state)
    for part in ("load1", "25 of 40 sent", "12 finished", "3 without a token yet", "5 refused, queue full", "8 s", "1 failed"):
        assert part in text
    assert HOSTILE not in text and 'aria-valuenow="42"' in text
    assert "No load of yours yet" in words.load_html(None)


def test_knobs_in_a_line() -> None:
    knobs = {"batching": "dynamic", "batching_timeout_ms": 50.0, "max_num_seqs": 8, "max_num_batched_tokens": 512, "enable_chunked_prefill": False, "preemption_mode": "swap", "prefix_index": "radix"}  # fmt: skip
    assert words.knobs_line(knobs) == "dynamic, waits 50 ms, batch 8, budget 512, not chunked, swap, radix"
    assert words.knobs_line({}) == "continuous"
    assert words.run_label(LoadRun("load2B", 0.0, {"batching": "static", "max_num_seqs": 4}, 1)) == "load2B: static, batch 4"


# -- settings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrivals", ARRIVALS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_choice_makes_a_load_that_fits(arrivals: str, shape: str) -> None:
    settings = Settings(arrivals=arrivals, num_requests=30, prompt_shape=shape, output_shape=shape, prompt_tokens=4000, output_tokens=4000, prefix_share=0.5, turns=3)  # fmt: skip
    made = list(conversations(to_load(settings, {"vocab_size": 259}, 128)))
    assert len(made) == 30
    for conversation in made:
        first = conversation.turns[0]
        assert len(first.token_ids) + first.max_tokens <= 128 and max(first.token_ids) < 259


def test_the_means_are_what_was_asked_for() -> None:
    load = to_load(Settings(num_requests=400, prompt_tokens=60, output_tokens=20), {"vocab_size": 49152}, 1024)
    first = [c.turns[0] for c in conversations(load)]
    assert sum(len(a.token_ids) for a in first) / 400 == pytest.approx(60, rel=0.06)
    assert sum(a.max_tokens for a in first) / 400 == pytest.approx(20, rel=0.15)
    assert lengths("equal", 5, 3).mean == 3 and lengths("uniform", 1, 9).mean == 1


def test_the_same_seed_is_the_same_load() -> None:
    load = to_load(Settings(seed=4), {}, 512)
    assert list(conversations(load)) == list(conversations(to_load(Settings(seed=4), {}, 512)))
    assert list(conversations(load)) != list(conversations(to_load(Settings(seed=5), {}, 512)))
