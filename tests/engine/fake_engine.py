"""An engine without a model, for tests of the process around it: it counts, and fails on demand."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.events.recorder import Recorder
from engine.events.types import EngineStarted, KnobChanged, RequestAdded, RequestFinished, RequestState, Run, Snapshot, StepDone
from engine.request import CompletionOutput, RequestOutput, SamplingParams


@dataclass
class Output:
    request_id: str
    index: int
    new_text: str = ""
    new_token_ids: tuple[int, ...] = ()
    finished: CompletionOutput | None = None
    request: RequestOutput | None = None


class FakeEngine:
    """Every request gives "0 1 2 ..." until its max_tokens. Prompts with a meaning: "crash", "exit", "sleep", "fail" (its step fails)."""

    def __init__(self, config: EngineConfig) -> None:
        if config.model == "missing":
            raise ValueError("no model called 'missing'")
        if config.model == "slow":
            time.sleep(1)
        print("fake engine up", flush=True)
        self.config = config
        self.recorder = Recorder()
        self.requests: dict[str, dict[str, Any]] = {}
        self.undelivered: list[Output] = []

    busy_beside_steps = False  # it makes nothing beside its steps

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams, *, owner: str, request_id: str) -> str:
        if not prompt:
            raise ValueError("the prompt is empty")
        if prompt == "exit":
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        self.requests[request_id] = {"prompt": prompt, "params": params, "owner": owner, "done": 0}
        if self.recorder.on:
            self.recorder.emit(
                RequestAdded,
                request_id=request_id,
                owner=owner,
                prompt_token_ids=[1, 2],
                prompt_text=str(prompt),
                sampling={"n": 1},
            )
        return request_id

    def step(self) -> list[Output]:
        outputs, runs = self.take_outputs(), []
        self.recorder.step += 1
        time.sleep(0.0005)
        for request_id, request in list(self.requests.items()):
            if request["prompt"] == "crash":
                raise RuntimeError("block 3 is in two places")
            if request["prompt"] == "fail":
                self._finish(request_id, "error")
                raise MemoryError("no memory for the logits")
            if request["prompt"] == "sleep":
                time.sleep(60)
            runs.append(Run(request_id, "decode", 1 + request["done"], 1, True))
            request["done"] += 1
            outputs.append(Output(request_id, 0, f"{request['done'] - 1} ", (request["done"],)))
            if request["done"] >= request["params"].max_tokens:
                self._finish(request_id, "length")
        if self.recorder.on:
            self.recorder.emit(
                StepDone, runs=runs, num_waiting=0, num_running=len(self.requests), token_budget=64, max_num_seqs=8, used_blocks=0,
                cached_free_blocks=0, schedule_ms=0.0, forward_ms=0.5, sample_ms=0.0, commit_ms=0.0, step_ms=0.5, record_ms=0.0,
                flops=1.0, weight_bytes=1.0, kv_read_bytes=1.0, kv_write_bytes=1.0,
            )  # fmt: skip
        return outputs + self.take_outputs()

    def _finish(self, request_id: str, reason: str) -> None:
        request = self.requests.pop(request_id)
        text = "".join(f"{i} " for i in range(request["done"]))
        done = CompletionOutput(0, list(range(request["done"])), text, reason)
        self.undelivered.append(Output(request_id, 0, finished=done, request=RequestOutput(request_id, [1, 2], [done], 0)))
        if self.recorder.on:
            self.recorder.emit(RequestFinished, request_id=request_id, reason=reason, num_output_tokens=request["done"])

    def take_outputs(self) -> list[Output]:
        outputs, self.undelivered = self.undelivered, []
        return outputs

    def has_unfinished(self) -> bool:
        return bool(self.requests or self.undelivered)

    def abort(self, request_id: str) -> bool:
        if request_id in self.requests:
            self._finish(request_id, "abort")
        return True

    def abort_owner(self, owner: str) -> None:
        for request_id in [i for i, r in self.requests.items() if r["owner"] == owner]:
            self._finish(request_id, "abort")

    def reconfigure(self, *, by: str = "", **knobs: Any) -> None:
        for name, value in knobs.items():
            old = getattr(self.config, name, None)
            self.config = self.config.changed(**{name: value})
            self.recorder.emit(KnobChanged, name=name, old=old, new=value, by=by)

    def watch(self, kind: str, request_id: str | None = None, *, top: int = 20) -> None:
        if kind != "tokens":
            raise ValueError(f"unknown observation {kind!r}")
        self.recorder.tokens_top = top
        if self.recorder.on:
            self.recorder.emit(KnobChanged, name="watch", old=None, new=top)

    def started_event(self) -> EngineStarted:
        return EngineStarted(
            step=self.recorder.step, time_ns=time.monotonic_ns(), config=self.config.as_dict(), model={}, device={"name": "fake"},
            versions={}, kv_bytes_per_block=1, kv_pool_bytes=4,
        )  # fmt: skip

    def snapshot(self) -> Snapshot:
        requests = [
            RequestState(
                request_id=request_id,
                owner=request["owner"],
                status="running",
                prompt_token_ids=[1, 2],
                output_token_ids=list(range(request["done"])),
                prompt_text=str(request["prompt"]),
                output_text="",
                sampling={},
                num_computed_tokens=1 + request["done"],
                block_ids=[],
            )
            for request_id, request in self.requests.items()
        ]
        return Snapshot(
            step=self.recorder.step, time_ns=time.monotonic_ns(), num_blocks=4, block_size=16, ref_counts=[0] * 4, cached={}, lru=[],
            requests=requests, knobs={},
        )  # fmt: skip

    def close(self) -> None:
        pass
