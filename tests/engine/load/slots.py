"""An engine without a model for load tests: so many slots, one token a step for each, and prompts that come free."""

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

from engine.events.recorder import Recorder
from engine.events.types import Run, Snapshot, StepDone


class SlotEngine:
    """Continuous batching on ``slots`` slots; the i-th output token of a request is i. A prompt that starts with 13 is refused."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.recorder = Recorder()
        self.waiting: deque[SimpleNamespace] = deque()
        self.running: list[SimpleNamespace] = []
        self.ended: list[Any] = []
        self.prompts: dict[str, list[int]] = {}
        self.priorities: dict[str, int] = {}
        self.most_waiting = 0

    def add_request(self, prompt: list[int], params: Any, *, owner: str, request_id: str, priority: int = 0) -> str:
        if prompt[0] == 13:
            raise ValueError("13 is refused")
        self.prompts[request_id] = list(prompt)
        self.priorities[request_id] = priority
        self.waiting.append(SimpleNamespace(request_id=request_id, prompt=list(prompt), params=params, output=[]))
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        return request_id

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.ended)

    def step(self) -> list[Any]:
        self.recorder.step += 1
        outputs, self.ended, runs = self.ended, [], []
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.popleft())
        for request in list(self.running):
            phase = "decode" if request.output else "prefill"
            runs.append(Run(request.request_id, phase, len(request.output), 1, True))
            request.output.append(len(request.output))
            outputs.append(
                SimpleNamespace(request_id=request.request_id, index=0, new_token_ids=(request.output[-1],), request=None)
            )
            if len(request.output) == request.params.max_tokens:
                self.running.remove(request)
                outputs.append(self._end(request, "length"))
        if self.recorder.on:
            self.recorder.emit(
                StepDone, runs=runs, num_waiting=len(self.waiting), num_running=len(self.running), token_budget=self.slots,
                max_num_seqs=self.slots, used_blocks=len(runs), cached_free_blocks=0, schedule_ms=0.0, forward_ms=0.0, sample_ms=0.0, commit_ms=0.0,
                step_ms=0.1, record_ms=0.0, flops=0.0, weight_bytes=0.0, kv_read_bytes=0.0, kv_write_bytes=0.0,
            )  # fmt: skip
        return outputs

    def _end(self, request: SimpleNamespace, reason: str) -> Any:
        first = SimpleNamespace(token_ids=list(request.output), finish_reason=reason, message="")
        return SimpleNamespace(request_id=request.request_id, index=0, new_token_ids=(), request=SimpleNamespace(outputs=[first]))

    def abort(self, request_id: str) -> bool:
        for queue in (self.waiting, self.running):
            for request in list(queue):
                if request.request_id == request_id:
                    queue.remove(request)
                    self.ended.append(self._end(request, "abort"))
        return True

    def snapshot(self) -> Snapshot:
        return Snapshot(
            step=self.recorder.step, time_ns=time.monotonic_ns(), num_blocks=2 * self.slots, block_size=4, ref_counts=[], cached={}, lru=[],
            requests=[], knobs={},
        )  # fmt: skip
