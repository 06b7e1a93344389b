"""``python -m engine.load --rate 2 --duration 30``: a load on an engine, and its measures. See ``--help``."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from engine.load.agenda import Results
from engine.load.arrivals import Arrivals, Burst, Constant, Poisson
from engine.load.cost import StepCost
from engine.load.generate import Load, conversations, make_load
from engine.load.lengths import FORMS, parse_lengths
from engine.load.replay import POLICIES, from_load, replay
from engine.measures import COMPLETED, QUEUE_FULL, Limits, Measures

_DEFAULT = Load(num_requests=1)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m engine.load", description=f"Put a load on an engine and print its measures. LENGTHS is {FORMS}."
    )
    what = p.add_argument_group("the load")
    what.add_argument("--arrivals", choices=("poisson", "constant", "burst"), default="poisson")
    what.add_argument("--rate", type=float, default=1.0, help="requests a second (default 1)")
    what.add_argument("--burst-size", type=int, metavar="N", help="requests at once (default: all of them)")
    what.add_argument("--duration", type=float, metavar="S", help="seconds in which requests are sent")
    what.add_argument("--requests", type=int, metavar="N", help="how many at most")
    what.add_argument(
        "--prompt", type=parse_lengths, metavar="LENGTHS", default=_DEFAULT.prompt, help="tokens of a prompt (default 64)"
    )
    what.add_argument(
        "--output", type=parse_lengths, metavar="LENGTHS", default=_DEFAULT.output, help="tokens to generate (default 32)"
    )
    what.add_argument(
        "--prefix-share", type=float, default=0.0, metavar="SHARE", help="of requests that begin with a common prefix"
    )
    what.add_argument("--num-prefixes", type=int, default=_DEFAULT.num_prefixes, metavar="N", help="different common prefixes")
    what.add_argument(
        "--prefix-length", type=int, default=_DEFAULT.prefix_length, metavar="N", help="tokens of each (default 128)"
    )
    what.add_argument(
        "--turns", type=parse_lengths, metavar="LENGTHS", default=_DEFAULT.turns, help="turns of a conversation (default 1)"
    )
    what.add_argument("--think", type=float, default=0.0, metavar="S", help="mean pause before a further turn")
    what.add_argument(
        "--priorities", type=_priorities, default={0: 1.0}, metavar="P:WEIGHT,...", help="shares of priorities, such as 0:3,1:1"
    )
    what.add_argument(
        "--sampling", type=_object, default={}, metavar="JSON", help="further SamplingParams, such as '{\"temperature\": 0.8}'"
    )
    what.add_argument("--seed", type=int, default=0, help="the same seed gives the same requests")
    what.add_argument("--max-waiting", type=int, metavar="N", help='a request that comes when N wait is refused: "queue full"')
    what.add_argument("--drain", type=float, metavar="S", help="abort what is not done S seconds after --duration")
    whom = p.add_argument_group("the engine (by default one in this process)")
    whom.add_argument(
        "--set",
        action="append",
        type=_setting,
        default=[],
        metavar="NAME=VALUE",
        dest="settings",
        help="of EngineConfig, such as max_num_seqs=4",
    )
    kind = whom.add_mutually_exclusive_group()
    kind.add_argument("--process", action="store_true", help="an engine in a process of its own")
    kind.add_argument("--url", help="a server with OpenAI's completions API, such as http://127.0.0.1:8000/v1")
    kind.add_argument("--simulate", type=float, metavar="MS", help="no engine: steps of MS milliseconds, modelled")
    whom.add_argument("--policy", choices=POLICIES, help="with --simulate (default continuous)")
    whom.add_argument("--served-model", metavar="NAME", help="with --url (default: the first that it lists)")
    whom.add_argument("--text", action="store_true", help="with --url: prompts of words, not token ids")
    whom.add_argument("--header", action="append", default=[], metavar="NAME: VALUE", help="with --url")
    shown = p.add_argument_group("the measures")
    shown.add_argument("--ttft-limit", type=float, metavar="MS", help="for goodput")
    shown.add_argument("--tpot-limit", type=float, metavar="MS", help="for goodput")
    shown.add_argument("--json", action="store_true", help="under vLLM's names, instead of the table")
    return p


def _priorities(text: str) -> dict[int, float]:
    return {int(priority): float(weight) for priority, _, weight in (part.partition(":") for part in text.split(","))}


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def make(args: argparse.Namespace, **facts: Any) -> Load:
    """The load that was asked for. ``facts``: of the model that is to run it."""
    arrivals: Arrivals = Burst(args.rate, args.burst_size)
    if args.arrivals != "burst":
        arrivals = Poisson(args.rate) if args.arrivals == "poisson" else Constant(args.rate)
    return Load(
        arrivals=arrivals, num_requests=args.requests, duration_s=args.duration, prompt=args.prompt, output=args.output,
        prefix_share=args.prefix_share, num_prefixes=args.num_prefixes, prefix_length=args.prefix_length, turns=args.turns,
        think_s=args.think, priorities=args.priorities, sampling=args.sampling, seed=args.seed, **facts,
    )  # fmt: skip


def _facts(vocab_size: int, max_model_len: int) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "max_model_len": max_model_len, "first_token": min(_DEFAULT.first_token, vocab_size - 1)}


def _engine(args: argparse.Namespace, how: dict[str, Any]) -> Results:
    from engine import Engine, EngineConfig
    from engine.load.drive import drive

    engine = Engine(EngineConfig(**dict(args.settings)))
    try:
        load = make(args, **_facts(engine.model_config.vocab_size, engine.max_tokens_of_a_request))
        return drive(engine, conversations(load), **how)
    finally:
        engine.close()


def _process(args: argparse.Namespace, how: dict[str, Any]) -> Results:
    from engine import messages as m
    from engine.config import EngineConfig
    from engine.load.process import drive_process
    from engine.process import EngineProcess

    with EngineProcess(EngineConfig(**dict(args.settings))) as process:
        while process.started is None:
            for message in process.poll(0.2):
                if isinstance(message, m.Died):
                    raise RuntimeError(message.error)
        load = make(args, **_facts(process.started.model["vocab_size"], process.started.config["max_model_len"]))
        return drive_process(process, conversations(load), **how)


def _server(args: argparse.Namespace, how: dict[str, Any]) -> Results:
    from engine.load.http import Target, drive_http, served_models

    headers = {name.strip(): value.strip() for name, _, value in (h.partition(":") for h in args.header)}
    target = Target(args.url, args.served_model or "", args.text, headers=headers)
    if not args.served_model:
        models = served_models(target)
        if not models:
            raise RuntimeError(f"{args.url} serves no model")
        target = Target(args.url, models[0], args.text, headers=headers)
    return drive_http(target, conversations(make(args)), **how)


def _simulated(args: argparse.Namespace, limits: Limits) -> Measures:
    settings = {**dict(args.settings)}
    settings["chunked"] = settings.pop("enable_chunked_prefill", True)
    try:
        made = replay(from_load(make_load(make(args))), StepCost(args.simulate / 1e3), args.policy or "continuous", **settings)
    except TypeError as error:
        raise ValueError(f"--set with --simulate: {error}") from None
    return made.measures(limits)


def run(args: argparse.Namespace) -> tuple[Measures, str]:
    """(measures, the first error of a request). ValueError, RuntimeError or OSError for what cannot be run at all."""
    limits = Limits(*(None if ms is None else ms / 1e3 for ms in (args.ttft_limit, args.tpot_limit)))
    if args.simulate is not None:
        if args.max_waiting is not None or args.drain is not None:
            raise ValueError("--max-waiting and --drain need an engine: --simulate has neither")
        return _simulated(args, limits), ""
    if args.policy is not None:
        raise ValueError(f"--policy is for --simulate; an engine's is --set batching={args.policy}")
    if args.drain is not None and args.duration is None:
        raise ValueError("--drain counts from the end of --duration, which is not given")
    stop = None if args.drain is None else args.duration + args.drain
    make(args)  # what is wrong with it is said before a model is loaded
    driver = _process if args.process else _server if args.url else _engine
    results = driver(args, {"max_waiting": args.max_waiting, "stop_s": stop})
    return results.measures(limits), results.first_error


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every request that was sent was completed or refused for a full queue; 1 when not; 2 for what cannot be run."""
    args = parser().parse_args(argv)
    try:
        measures, error = run(args)
    except (ValueError, RuntimeError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    print(json.dumps(_plain(measures.as_metrics()), indent=2) if args.json else measures.table())
    if error:
        print(f"the first error: {error}", file=sys.stderr)
    lost = sum(n for name, n in measures.outcomes.items() if name not in (*COMPLETED, QUEUE_FULL))
    return 1 if lost else 0


def _plain(value: Any) -> Any:
    """As JSON has it: NaN, for nothing to say, is null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    sys.exit(main())
