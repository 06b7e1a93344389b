"""Events of loads that a replay with known step costs made, and a view that a tab can stand in."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from engine.events.types import (
    EngineStarted,
    Event,
    KnobChanged,
    PrefixLookup,
    RequestAdded,
    RequestFinished,
    Run,
    Snapshot,
    StepDone,
)
from engine.load.cost import StepCost
from engine.load.replay import Replayed, replay
from explorer.base import Clock, ViewLock
from explorer.batching.whatif_rows import Setting
from explorer.store import EventStore

COST = StepCost(0.010, 0.0002, 1e-6)
MODEL = {"name": "made", "num_layers": 30, "num_kv_heads": 3, "head_dim": 64}
BLOCKS = 4096


class Desk:
    """A session that writes down what it was asked for."""

    status = "running"

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.unfinished: set[str] = set()
        self.knobs: dict[str, Any] = {}
        self.store = SimpleNamespace(latest=lambda: SimpleNamespace(knobs=self.knobs, requests={}))

    def submit(self, prompt: Any, params: Any, owner: str, **more: Any) -> str:
        self.calls.append(("submit", (tuple(prompt), params, owner), more))
        return f"sent-{len(self.calls)}"

    def owns(self, request_id: str, owner: str) -> bool:
        return request_id in self.unfinished

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **named: self.calls.append((name, args, named))

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, named) for called, args, named in self.calls if called == name]


class View:
    """What a tab needs of the page's view."""

    def __init__(self, live: bool = True) -> None:
        self.store = EventStore()
        self.store.replayed = not live
        self.session: Any = Desk() if live else None
        self.clock = Clock(owner="ann")
        self.lock = ViewLock(lambda: self.store.replayed)
        self.param: tuple[str, ...] = ()  # it has no address

    def give(self, tab: Any, *events: Event) -> None:
        """What the page does: events into the store, to the tab, and one update."""
        self.store.append(events)
        with self.lock:
            tab.take(events)
            tab.update()


class Made:
    """A recorded run, load after load. ``events`` grows."""

    def __init__(self, setting: Setting | None = None, **config: Any) -> None:
        self.setting = setting or Setting(num_kv_blocks=BLOCKS)
        self.step, self.now_ns, self.count = 0, 1_000_000_000, 0
        knobs = {name: getattr(self.setting, name) for name in Setting.__dataclass_fields__} | {"num_kv_blocks": BLOCKS}
        facts = {**knobs, "max_model_len": 2048, **config}
        self.events: list[Event] = [
            EngineStarted(step=0, time_ns=self.now_ns, config=facts, model=MODEL, device={"device": "cpu", "dtype": "float32"},
                          versions={}, kv_bytes_per_block=1024, kv_pool_bytes=1024 * BLOCKS),
            Snapshot(step=0, time_ns=self.now_ns, num_blocks=BLOCKS, block_size=16, ref_counts=[0] * BLOCKS, cached={}, lru=[],
                     requests=[], knobs=knobs),
        ]  # fmt: skip

    def knobs(self, **moved: Any) -> "Made":
        for name, value in moved.items():
            old = getattr(self.setting, name)
            self.events.append(KnobChanged(step=self.step, time_ns=self.now_ns, name=name, old=old, new=value, by="ann"))
        self.setting = self.setting.changed(**moved)
        return self

    def load(
        self,
        requests: Sequence[Replayed],
        cost: StepCost = COST,
        slow: int | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> "Made":
        """Those requests, as the scheduler's rules have it. ``slow``: a step of this number took 100 times as long as it should."""
        s = self.setting
        made = replay(requests, cost, s.batching, max_num_seqs=s.max_num_seqs, max_num_batched_tokens=s.max_num_batched_tokens,
                      chunked=s.enable_chunked_prefill, max_wait_s=s.batching_timeout_ms / 1e3)  # fmt: skip
        names = [f"r{self.count + i}" for i in range(len(requests))]
        self.count += len(requests)
        begin, late = self.now_ns, 0
        arriving = sorted(range(len(requests)), key=lambda i: requests[i].arrival_s)
        computed = [0] * len(requests)
        outputs = [0] * len(requests)
        looked = set()

        def at(seconds: float) -> int:
            return begin + round(1e9 * seconds) + late

        for number, step in enumerate(made.steps):
            while arriving and requests[arriving[0]].arrival_s <= step.end_s:
                i = arriving.pop(0)
                r = requests[i]
                prompt = list(prompts[i]) if prompts else [300 + i] * r.num_prompt_tokens
                self.events.append(
                    RequestAdded(step=self.step, time_ns=at(r.arrival_s), request_id=names[i], owner="ann", prompt_token_ids=prompt,
                                 prompt_text="", sampling={"temperature": 0.0, "max_tokens": r.num_output_tokens, "seed": 1})
                )  # fmt: skip
            self.step += 1
            if number == slow:
                late += round(99e9 * (step.end_s - step.start_s))
            runs, ended = [], []
            for cell in step.cells:
                r = requests[cell.request]
                if cell.phase == "padding":
                    runs.append(Run(names[cell.request], "padding", 0, cell.num_tokens, False))
                    continue
                if cell.request not in looked:
                    looked.add(cell.request)
                    hit = r.num_cached_tokens
                    computed[cell.request] = hit
                    self.events.append(
                        PrefixLookup(step=self.step, time_ns=at(step.start_s), request_id=names[cell.request], num_tokens=r.num_prompt_tokens,
                                     num_hit_tokens=hit, block_ids=[], miss_reason="" if hit else "no such prefix")
                    )  # fmt: skip
                start = computed[cell.request]
                computed[cell.request] += cell.num_tokens
                sampled = computed[cell.request] >= r.num_prompt_tokens
                runs.append(Run(names[cell.request], cell.phase, start, cell.num_tokens, sampled))
                outputs[cell.request] += sampled
                if outputs[cell.request] == r.num_output_tokens:
                    ended.append(cell.request)
            ms = 1e3 * (step.end_s - step.start_s) * (100 if number == slow else 1)
            self.events += [
                RequestFinished(
                    step=self.step, time_ns=at(step.end_s), request_id=names[i], reason="length", num_output_tokens=outputs[i]
                )
                for i in ended
            ]
            self.events.append(self._done(runs, at(step.end_s), ms, step.num_waiting))
        self.now_ns = at(made.steps[-1].end_s) + 50_000_000
        return self

    def _done(self, runs: list[Run], time_ns: int, ms: float, waiting: int) -> StepDone:
        tokens = sum(r.num_tokens for r in runs)
        return StepDone(
            step=self.step, time_ns=time_ns, runs=runs, num_waiting=waiting, num_running=len(runs),
            token_budget=self.setting.max_num_batched_tokens, max_num_seqs=self.setting.max_num_seqs, used_blocks=len(runs),
            cached_free_blocks=0, schedule_ms=0.1, forward_ms=ms - 0.2, sample_ms=0.05, commit_ms=0.05, step_ms=ms, record_ms=0.0,
            flops=2e8 * tokens, weight_bytes=1e8, kv_read_bytes=2e5 * tokens, kv_write_bytes=4e4 * tokens,
        )  # fmt: skip

    def pause(self, seconds: float) -> "Made":
        self.now_ns += round(1e9 * seconds)
        return self
