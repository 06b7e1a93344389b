"""Make the recorded runs that ship with Cutaway anew, with the default model.

    python -m explorer.sources.record [--folder explorer/runs]

The texts and seeds are fixed, so the same model on the same machine gives the same runs but for their times.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.events.log import EventLog
from engine.loading import Parts, load_parts
from engine.request import SamplingParams
from explorer.runs import FOLDER, SHIPPED

MODEL = "smollm2-135m"
TOP = 6  # candidates kept with every token
MAX_BYTES = 300 * 1024  # of one file
TEXT = (
    "You answer questions about this text, in one or two short sentences.\n\n"
    "The lighthouse on Gull Rock was built in 1874 from granite that was cut on the mainland and brought over by barge. "
    "Its lamp burned whale oil at first, then paraffin, and since 1931 electricity. Three keepers lived there in turns of "
    "six weeks; they rowed ashore for bread and letters when the sea allowed it. The last keeper, Marta Lund, left in 1983, "
    "and a machine has turned the lamp ever since. Every ten seconds it shows two white flashes, seen from nineteen miles away."
)  # fmt: skip
QUESTIONS = (
    ("ann", "When was the lighthouse built?", 0.0),
    ("ann", "What did the keepers row ashore for?", 0.0),
    ("bob", "Who was the last keeper?", 0.3),
    ("bob", "How far can the light be seen?", 0.3),
    ("cem", "What burned in the lamp at first?", 0.6),
    ("cem", "Write a title for this text.", 0.9),
)


def shared_prefix(engine: Engine) -> None:
    """Six questions about one text; two at a time, so that the later ones find what the first have computed."""
    engine.measure_cache([16, 64, 128, 256, 512, 1024])
    for i, (owner, question, temperature) in enumerate(QUESTIONS):
        messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": question}]
        prompt = engine.tokenizer.apply_chat_template(messages)
        params = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=32, seed=100 + i)
        engine.add_request(prompt, params, owner=owner, request_id=f"req-{i}")
        if i % 2:
            step(engine, 14)
    step(engine, 400)


def full_pool(engine: Engine) -> None:
    """Eight stories in a pool for about four; then a smaller batch, then a larger pool."""
    beginnings = (
        "Once upon a time there was a fox who", "The recipe begins with two cups of", "Dear neighbours, I am writing to you because",
        "In the year 2140 the first train to Mars", "The three laws of thermodynamics say that", "My grandmother used to tell me that",
        "Breaking news: this morning a whale", "To build a small boat you need",
    )  # fmt: skip
    for i, text in enumerate(beginnings):
        params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=56 if i < 6 else 40, seed=200 + i, ignore_eos=True)
        engine.add_request(text, params, owner=("ann", "bob", "cem")[i % 3], request_id=f"req-{i}")
        step(engine, 3)
    step(engine, 40)
    engine.reconfigure(max_num_seqs=3, by="ann")
    step(engine, 30)
    engine.reconfigure(num_kv_blocks=48, by="bob")
    step(engine, 60)
    engine.add_request(beginnings[0], SamplingParams(temperature=0, max_tokens=24), owner="bob", request_id="req-8")
    step(engine, 400)


def step(engine: Engine, count: int) -> None:
    for _i in range(count):
        if not engine.has_unfinished():
            return
        engine.step()


MAKERS: dict[str, tuple[Callable[[Engine], None], dict[str, Any]]] = {
    "shared-prefix": (shared_prefix, {"max_num_seqs": 4, "max_num_batched_tokens": 128, "num_kv_blocks": 128, "max_model_len": 1024}),
    "full-pool": (full_pool, {"max_num_seqs": 6, "max_num_batched_tokens": 64, "num_kv_blocks": 18, "max_model_len": 256}),
}  # fmt: skip


def record(name: str, parts: Parts) -> EventLog:
    """One of the runs, made now."""
    make, knobs = MAKERS[name]
    engine = Engine(EngineConfig(model=MODEL, **knobs), parts=parts)
    engine.watch("tokens", top=TOP)
    with engine.record() as log:
        make(engine)
    engine.close()
    return log


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m explorer.sources.record", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args(arguments).folder
    parts = load_parts(EngineConfig(model=MODEL))
    for name, run in SHIPPED.items():
        log = record(name, parts)
        path = folder / run.path.name
        log.save(path, {"title": run.title})
        path.chmod(0o644)
        size = path.stat().st_size
        print(f"{path}: {len(log):,} events in {log.last_step} steps, {size / 1024:.0f} KiB")
        if size > MAX_BYTES:
            raise SystemExit(f"{path} is larger than {MAX_BYTES // 1024} KiB")


if __name__ == "__main__":
    main()
