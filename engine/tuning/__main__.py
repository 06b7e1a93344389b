"""``python -m engine.tuning --rate 4 --requests 32 --ttft-limit 1000 --tpot-limit 100``: the configuration for a load. See ``--help``."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.load.__main__ import make
from engine.load.generate import Load
from engine.load.lengths import FORMS, parse_lengths
from engine.measures import Limits
from engine.tuning.front import AXES, OBJECTIVES, values_of
from engine.tuning.result import Trial, Tuning, knobs_text
from engine.tuning.search import EXECUTORS, Budget, Search
from engine.tuning.space import Space, default_space

_LOAD = Load(num_requests=1)
_BUDGET = Budget()


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m engine.tuning",
        description=f"Search the configuration for a load: measures trials, each with an engine in a fresh process. LENGTHS is {FORMS}.",
    )
    load = p.add_argument_group("the load")
    load.add_argument("--arrivals", choices=("poisson", "constant", "burst"), default="poisson")
    load.add_argument("--rate", type=float, default=4.0, help="requests a second (default 4)")
    load.add_argument("--burst-size", type=int, metavar="N", help="requests at once (default: all of them)")
    load.add_argument("--requests", type=int, default=32, metavar="N", help="how many (default 32)")
    load.add_argument(
        "--prompt", type=parse_lengths, metavar="LENGTHS", default=_LOAD.prompt, help="tokens of a prompt (default 64)"
    )
    load.add_argument(
        "--output", type=parse_lengths, metavar="LENGTHS", default=_LOAD.output, help="tokens to generate (default 32)"
    )
    load.add_argument(
        "--prefix-share", type=float, default=0.0, metavar="SHARE", help="of requests that begin with a common prefix"
    )
    load.add_argument("--num-prefixes", type=int, default=_LOAD.num_prefixes, metavar="N", help="different common prefixes")
    load.add_argument("--prefix-length", type=int, default=_LOAD.prefix_length, metavar="N", help="tokens of each (default 128)")
    load.add_argument(
        "--turns", type=parse_lengths, metavar="LENGTHS", default=_LOAD.turns, help="turns of a conversation (default 1)"
    )
    load.add_argument("--think", type=float, default=0.0, metavar="S", help="mean pause before a further turn")
    limits = p.add_argument_group("the limits that a good request keeps")
    limits.add_argument("--ttft-limit", type=float, metavar="MS", help="time to first token")
    limits.add_argument("--tpot-limit", type=float, metavar="MS", help="time per output token")
    search = p.add_argument_group("the search")
    search.add_argument(
        "--set",
        action="append",
        type=_setting,
        default=[],
        metavar="NAME=VALUE",
        dest="settings",
        help="of the default configuration",
    )
    search.add_argument(
        "--knob", action="append", type=_knob, default=[], metavar="NAME=VALUE,...", dest="knobs",
        help="what to choose from (with pool_share for the KV pool); the others of the default space stay as they are configured",
    )  # fmt: skip
    search.add_argument("--trials", type=int, default=_BUDGET.trials, metavar="N", help=f"at most (default {_BUDGET.trials})")
    search.add_argument("--seconds", type=float, metavar="S", help="at most, of all trials")
    search.add_argument("--trial-seconds", type=float, metavar="S", help="at most, of one trial")
    search.add_argument(
        "--repeats",
        type=int,
        default=_BUDGET.repeats,
        metavar="N",
        help="times that default and best are measured again (default 1)",
    )
    search.add_argument("--objectives", default=",".join(OBJECTIVES), metavar="NAME,...", help=f"of {', '.join(AXES)}")
    search.add_argument("--executor", choices=EXECUTORS, default="process")
    search.add_argument("--ray-address", metavar="ADDRESS", help="of a Ray cluster (default: RAY_ADDRESS, or a new local one)")
    search.add_argument("--workers", type=int, default=1, metavar="N", help="trials at once (default 1)")
    search.add_argument("--seed", type=int, default=0, help="of load and search")
    search.add_argument("--json", action="store_true", help="instead of the table")
    search.set_defaults(duration=None, priorities={0: 1.0}, sampling={})
    return p


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(text)
    return name, _value(value)


def _knob(text: str) -> tuple[str, tuple[Any, ...]]:
    name, value = _setting(text)
    return name, tuple(_value(part) for part in str(text.partition("=")[2]).split(",")) if value != "" else ()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def search_of(args: argparse.Namespace) -> Search:
    """ValueError for what cannot be searched."""
    load, config = make(args), EngineConfig(**dict(args.settings))
    limits = Limits(*(None if ms is None else ms / 1e3 for ms in (args.ttft_limit, args.tpot_limit)))
    budget = Budget(trials=args.trials, seconds=args.seconds, trial_seconds=args.trial_seconds, repeats=args.repeats)
    space = Space(dict(args.knobs)) if args.knobs else default_space(config, load)
    options = {"address": args.ray_address} if args.executor == "ray" else {}
    return Search(
        load, limits, config, space=space, budget=budget, objectives=tuple(args.objectives.split(",")), executor=args.executor,
        workers=args.workers, seed=args.seed, progress=_Line(args.trials), options=options,
    )  # fmt: skip


class _Line:
    """Tells every trial that ends, on standard error."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.told: set[int] = set()

    def __call__(self, found: Tuning) -> None:
        for trial in found.trials:
            if trial.state != "running" and trial.number not in self.told:
                self.told.add(trial.number)
                m = trial.measures
                what = (
                    trial.reason or trial.state if m is None else f"{m.output_throughput:.1f} tokens/s, goodput {m.goodput:.2f}"
                )
                print(
                    f"[{len(self.told)}/{self.total}, {found.seconds:.0f} s] {knobs_text(trial.knobs)}: {what}",
                    file=sys.stderr,
                    flush=True,
                )


def main(argv: Sequence[str] | None = None) -> int:
    """0 when a configuration was found; 1 when nothing could be measured; 2 for what cannot be searched."""
    args = parser().parse_args(argv)
    try:
        search = search_of(args)
        found = search.run()
    except (ValueError, RuntimeError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    print(json.dumps(_plain(found), indent=2, default=str) if args.json else found.table())
    return 0 if found.chosen is not None else 1


def _plain(found: Tuning) -> dict[str, Any]:
    front, chosen = {t.number for t in found.front()}, found.chosen
    return {
        "stopped": found.stopped, "seconds": found.seconds, "chosen": None if chosen is None else chosen.number, "config": found.text,
        "trials": [_plain_trial(t, t.number in front) for t in found.trials],
    }  # fmt: skip


def _plain_trial(trial: Trial, on_front: bool) -> dict[str, Any]:
    values: dict[str, float | None] = dict.fromkeys(AXES)
    if trial.measures is not None:
        values = {
            name: None if v != v else v for name, v in zip(AXES, values_of(trial.measures, list(AXES.values())), strict=True)
        }
    return {
        "number": trial.number, "knobs": trial.knobs, "state": trial.state, "reason": trial.reason, "again": trial.again,
        "front": on_front, "seconds": trial.seconds, **values,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
