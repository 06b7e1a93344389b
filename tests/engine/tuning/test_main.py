"""The command line: options, the table, JSON, errors in words."""

import json
from shlex import split
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.load.arrivals import Burst, Poisson
from engine.load.lengths import Uniform
from engine.measures import Limits
from engine.tuning import __main__ as command
from engine.tuning.search import Budget, Search
from tests.engine.tuning.fake import Inline, run


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Search", lambda *args, **how: Search(*args, **{**how, "executor": Inline(), "measure": run}))


def search_of(options: str) -> Search:
    return command.search_of(command.parser().parse_args(split(options)))


def test_the_options_make_the_search() -> None:
    search = search_of(
        "--rate 3 --requests 9 --prompt uniform:4:28 --ttft-limit 500 --tpot-limit 80 --set max_num_seqs=3 --set model=m "
        "--knob max_num_seqs=1,3 --knob enable_chunked_prefill=true,false --knob batching=continuous --knob kv_cache_dtype=auto,int8 "
        "--trials 7 --seconds 60 --trial-seconds 9 --repeats 2 --workers 2 --seed 5 --objectives goodput,e2e_p99"
    )
    assert (search.load.arrivals, search.load.num_requests, search.load.prompt) == (Poisson(3.0), 9, Uniform(4, 28))
    assert search.limits == Limits(0.5, 0.08) and search.config == EngineConfig(model="m", max_num_seqs=3)
    assert search.space.choices == {
        "max_num_seqs": (1, 3), "enable_chunked_prefill": (True, False), "batching": ("continuous",), "kv_cache_dtype": ("auto", "int8"),
    }  # fmt: skip
    assert search.budget == Budget(trials=7, seconds=60, trial_seconds=9, repeats=2) and (search.workers, search.seed) == (2, 5)
    assert [axis.name for axis in search.axes] == ["goodput", "e2e_p99"] and search.load.seed == 5
    default = search_of("--arrivals burst --rate 1")
    assert default.load.arrivals == Burst() and "pool_share" in default.space.choices and default.limits == Limits()
    ray = search_of("--executor ray --ray-address host:6379")
    assert (ray.executor, ray.options) == ("ray", {"address": "host:6379"})


def test_a_table_and_the_text_to_copy(inline: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(split("--ttft-limit 1000 --tpot-limit 50 --trials 12 --knob max_num_seqs=4,8,16,32")) == 0
    out, err = capsys.readouterr()
    assert "on the front, * chosen" in out and "everything there was to choose from was tried" in out
    assert out.endswith("EngineConfig(\n    model='smollm2-135m',\n    max_num_seqs=16,\n)\n")
    assert err.count("tokens/s, goodput") == 6 and "[1/12, 0 s] max_num_seqs=8: " in err  # four, and default and best again


def test_json(inline: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(split("--tpot-limit 50 --trials 4 --repeats 0 --knob max_num_seqs=4,8,16,32 --json")) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["stopped"] == "trials" and len(found["trials"]) == 4 and found["trials"][0]["knobs"] == {"max_num_seqs": 8}
    chosen = found["trials"][found["chosen"]]
    assert (
        chosen["front"]
        and chosen["goodput"] == max(t["goodput"] for t in found["trials"])
        and chosen["e2e_p99"] > chosen["ttft_p99"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rate 0", "rate must be a number of requests a second > 0"),
        ("--knob speed=1", "'speed' cannot be tuned"),
        ("--knob max_num_seqs=", "max_num_seqs needs at least one value"),
        ("--knob max_num_seqs=0", "max_num_seqs must be an integer"),
        ("--objectives speed", "objectives must be different ones of"),
        ("--set speed=1", "unknown EngineConfig field 'speed'"),
        ("--trials 0", "trials must be an integer >= 1"),
        ("--tpot-limit -1", "tpot_s must be None or a number of seconds > 0"),
    ],
)
def test_what_cannot_be_searched_is_said(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(split(options)) == 2
    assert message in capsys.readouterr().err


def test_nothing_measured_is_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fails = Inline(lambda config: "no memory")
    monkeypatch.setattr(command, "Search", lambda *args, **how: Search(*args, **{**how, "executor": fails, "measure": run}))
    assert command.main(split("--trials 2")) == 1
    assert "failed: no memory" in capsys.readouterr().out
