"""Repeat a recorded run with a fresh engine, and say whether it came out the same.

    python -m explorer.sources.rerun run.cutaway                      # re-run and verify
    python -m explorer.sources.rerun run.cutaway --set temperature=0  # rerun with one thing changed
    python -m explorer.sources.rerun run.cutaway --save again.cutaway --model /path/to/model.gguf

Same configuration, seeds, requests and knob changes, each at the step after which it came. What was decided by a clock or by who
else used the machine does not count: the engine's choices depend on neither.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.events.log import EventLog
from engine.loading import Parts
from engine.model.find import find_model
from engine.request import SamplingParams
from explorer.compare.comparison import Comparison, compare
from explorer.compare.words import report
from explorer.i18n import _
from explorer.sources.plan import Abort, Action, Add, Branch, Plan, Reconfigure, UpdateSampling, plan_of

Progress = Callable[[int, int], None]  # (steps done, steps of the recorded run)


class ModelMissing(ValueError):
    """The run's model is not on this machine; the message says which one it was."""


@dataclass
class Verified:
    """A run, its repetition, and how the two compare. ``notes``: what could not be repeated as it was."""

    log: EventLog
    comparison: Comparison
    notes: list[str]


def verify(
    log: EventLog,
    *,
    model: str | None = None,
    plan: Plan | None = None,
    parts: Parts | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Repeat the run in ``log`` and compare. ``model``: where its model lies here, when not under the recorded name.

    ``plan``: something else to carry out (``plan_of(log).changed(...)``). ``parts``: a loaded checkpoint to use. ModelMissing (a
    ValueError) where there is no model; ValueError for a run that cannot be repeated. Nothing is fetched.
    """
    plan = plan if plan is not None else plan_of(log)
    if parts is None:
        plan = here(plan, model)
    again, notes = repeat(plan, parts=parts, progress=progress)
    return Verified(again, compare(log, again), plan.notes + notes)


def here(plan: Plan, model: str | None = None) -> Plan:
    """The plan with a model and a device that this machine has. ModelMissing where there is no such model."""
    name = model if model is not None else plan.config.model
    if find_model(name) is None:
        facts = plan.started.model
        raise ModelMissing(
            _(
                "The model of this run is not here: {name}, file {file}, SHA-256 {sha}. What was recorded can be looked at; to repeat "
                "it, fetch the model (make model, or a path to it)."
            ).format(name=plan.config.model, file=facts.get("file", "?"), sha=facts.get("sha256", "?"))
        )
    return _on_this_device(replace(plan, config=plan.config.changed(model=name)))


def _on_this_device(plan: Plan) -> Plan:
    from engine.hardware.device import resolve_device

    config = plan.config
    try:
        resolve_device(config.device, config.dtype, config.attention_backend)
        return plan
    except ValueError as error:
        note = _("This machine cannot do what the run did ({error}); it is repeated with what there is.").format(error=error)
        config = config.changed(device="auto", dtype="auto", attention_backend="auto")
        return replace(plan, config=config, notes=[*plan.notes, note])


def repeat(plan: Plan, *, parts: Parts | None = None, progress: Progress | None = None) -> tuple[EventLog, list[str]]:
    """Carry out the plan with a fresh engine in this thread. (Its log, what was refused.)"""
    engine = Engine(plan.config, parts=parts)
    notes: list[str] = []
    try:
        engine.watch("tokens", top=plan.top)
        with engine.record() as log:
            for action in plan.actions:
                _advance(engine, action.step, plan, progress)
                try:
                    perform(engine, action)
                except ValueError as error:
                    notes.append(refused(action, error))
            _advance(engine, plan.num_steps, plan, progress)
            if not plan.ends_open:
                _advance(engine, None, plan, progress)
    finally:
        engine.close()
    return log, notes


def _advance(engine: Engine, step: int | None, plan: Plan, progress: Progress | None) -> None:
    """Step until ``step`` (None: until nothing is left); earlier when there is nothing to do, as when a repetition ended sooner."""
    while engine.has_unfinished() and (step is None or engine.recorder.step < step):
        engine.step()
        if progress is not None:
            progress(engine.recorder.step, plan.num_steps)


def perform(engine: Any, action: Action) -> None:
    """One action, to an Engine or to an EngineProcess. ValueError where it is refused."""
    if isinstance(action, Add):
        engine.add_request(
            action.prompt_token_ids, action.params, owner=action.owner, request_id=action.request_id, cache_salt=action.cache_salt
        )
    elif isinstance(action, Branch):
        engine.branch(
            action.source_id, action.position, action.token_id, action.params, owner=action.owner, branch_id=action.request_id
        )
    elif isinstance(action, Abort):
        engine.abort(action.request_id)
    elif isinstance(action, Reconfigure):
        engine.reconfigure(by=action.by, **{action.name: action.value})
    elif isinstance(action, UpdateSampling):
        engine.update_sampling(action.request_id, by=action.by, **{action.name: action.value})


def refused(action: Action, error: Any) -> str:
    return _("After step {step} not done again: {what}: {error}").format(
        step=action.step, what=type(action).__name__, error=error
    )


def changed_plan(plan: Plan, changes: dict[str, Any]) -> Plan:
    """``Plan.changed`` for names of either kind. ValueError for one that is none of EngineConfig's or SamplingParams'."""
    config = {name: value for name, value in changes.items() if name in EngineConfig.__dataclass_fields__}
    sampling = {name: value for name, value in changes.items() if name not in config}
    for name in sampling:
        if name not in SamplingParams.__dataclass_fields__:
            raise ValueError(f"{name!r} is neither a field of EngineConfig nor of SamplingParams")
    return plan.changed(config=config, sampling=sampling)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m explorer.sources.rerun", description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("run", help="a saved run (.cutaway)")
    parser.add_argument("--model", help="the model to use, when it is not under the recorded name here")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="change one thing (a knob, or a parameter of all requests)",
    )
    parser.add_argument("--save", metavar="FILE", help="save the repetition as a run of its own")
    parser.add_argument("--progress", action="store_true", help="print a line for every twentieth of the steps")
    args = parser.parse_args(arguments)
    try:
        log = EventLog.load(args.run, check=True)
        plan = changed_plan(plan_of(log), dict(_setting(text) for text in args.set))
        done = verify(log, model=args.model, plan=plan, progress=_progress if args.progress else None)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(report(done.comparison, done.notes)))
    if args.save:
        done.log.save(args.save)
    return 0 if done.comparison.same else 1


def _setting(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"--set takes NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _progress(done: int, total: int) -> None:
    if done == total or done % max(1, total // 20) == 0:
        print(f"step {done} of {total}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
