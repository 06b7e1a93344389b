"""The command line: loads from options, measures as a table or as JSON, errors in words."""

import json
from shlex import split

import pytest

from engine.load.__main__ import main, make, parser
from engine.load.arrivals import Burst, Poisson
from engine.load.lengths import Exponential
from tests.engine.engines import tiny_parts
from tests.engine.load.server import serving


def test_the_options_make_the_load() -> None:
    args = parser().parse_args(
        split(
            "--rate 3 --duration 9 --output exponential:8 --turns 2 --think 0.5 --priorities 0:3,1:1 --prefix-share 0.5 --seed 4"
        )
    )
    load = make(args)
    assert (load.arrivals, load.duration_s, load.output, load.think_s, load.seed) == (Poisson(3.0), 9.0, Exponential(8.0), 0.5, 4)
    assert load.priorities == {0: 3.0, 1: 1.0} and load.prefix_share == 0.5
    assert make(parser().parse_args(split("--arrivals burst --requests 7"))).arrivals == Burst(1.0, None)


def test_an_engine_in_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    _, made = tiny_parts()
    options = f"--rate 100 --requests 3 --prompt 5 --output 4 --ttft-limit 60000 --set model={made.path} --set dtype=float32 --set max_model_len=64"
    assert main(f"{options} --set num_kv_blocks=32".split()) == 0
    out = capsys.readouterr().out
    assert "3 length" in out and "15 in" in out and "12 out" in out and "goodput" in out and "KV use" in out


def test_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        options = ["--rate", "100", "--requests", "3", "--output", "4", "--url", server.url]
        assert main([*options, "--header", "X-Who: me"]) == 0
        assert server.got[0]["model"] == "counter" and server.headers_seen[0]["X-Who"] == "me"
        assert "3 length" in capsys.readouterr().out
        server.mode = "400"
        assert main(options) == 1
        assert "no, thank you" in capsys.readouterr().err
        server.mode, server.gap_s = "count", 0.05
        late = ["--rate", "100", "--duration", "0.1", "--drain", "0.1", "--output", "100", "--url", server.url]
        assert main(late) == 1 and "abort" in capsys.readouterr().out


def test_simulated_policies_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = split("--arrivals burst --requests 64 --prompt 1 --output exponential:9 --simulate 10 --json --set max_num_seqs=8")
    duration = {}
    for policy in ("static", "continuous"):
        assert main([*options, "--policy", policy]) == 0
        metrics = json.loads(capsys.readouterr().out)
        assert metrics["vllm:request_success_total"] == 64
        assert metrics["vllm:inter_token_latency_seconds"]["p50"] == pytest.approx(0.01)
        assert metrics["vllm:kv_cache_usage_perc"] is None  # no pool was modelled
        duration[policy] = metrics["vllm:e2e_request_latency_seconds"]["max"]
    assert duration["static"] > 1.5 * duration["continuous"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rate 0 --requests 1", "rate must be"),
        ("--rate 1", "must be given"),
        ("--requests 1 --drain 3", "--duration"),
        ("--requests 1 --url nowhere", "url must be"),
        ("--requests 1 --set colour=red", "colour"),
        ("--requests 1 --simulate 5 --set colour=red", "colour"),
        ("--requests 1 --simulate 0", "not all 0"),
        ("--requests 1 --ttft-limit -1", "ttft_s"),
        ("--requests 1 --turns 2 --simulate 5", "later turn"),
        ("--requests 1 --simulate 5 --max-waiting 2", "--simulate"),
        ("--duration 1 --simulate 5 --drain 2", "--simulate"),
        ("--requests 1 --policy static", "--set batching=static"),
    ],
)
def test_what_cannot_be_run(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", ["--prompt normal:3", "--priorities x", "--sampling 3", "--set 3", "--process --url http://x", "--policy best"]
)
def test_options_that_are_none(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parser().parse_args(options.split())
    assert error.value.code == 2 and "error" in capsys.readouterr().err
