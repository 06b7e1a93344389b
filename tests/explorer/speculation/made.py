"""Events of an engine that speculates, made by hand: consistent, not real. A tiny language in which every token is one letter."""

import math
import random
import time
from typing import Any

from engine.events.log import EventLog
from engine.events.types import (
    DraftNode,
    DraftProposed,
    DraftVerified,
    EngineStarted,
    Event,
    KnobChanged,
    RequestAdded,
    RequestFinished,
    Run,
    Snapshot,
    StepDone,
    TokenSampled,
    VerifiedNode,
)

VOCAB = 8
TEXTS = [" alpha", " beta", " gamma", "\n", " <b>", " eta", " theta", " iota"]
SPEC = {"method": "eagle", "num_speculative_tokens": 4, "acceptance": "rejection", "tree": None}


class Made:
    """Writes events into ``log``. ``step_ms`` of a plain step is 10; of one that verifies n tokens 10 + n, and drafting takes 0.5 n."""

    def __init__(self, speculative: dict[str, Any] | None = SPEC, model: dict[str, Any] | None = None, seed: int = 1) -> None:
        self.random = random.Random(seed)
        self.log = EventLog()
        self.step = 0
        self.spec = speculative
        self.lengths: dict[str, int] = {}
        self.temperatures: dict[str, float] = {}
        config = {"max_num_seqs": 8, "speculative": speculative, "model": "m", "block_size": 16}
        facts = {"name": "m", "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "vocab_size": VOCAB, "num_parameters": 1000}
        self.emit(
            EngineStarted, config=config, model=model or facts, device={"device": "cpu", "dtype": "float32"}, versions={},
            kv_bytes_per_block=1, kv_pool_bytes=64,
        )  # fmt: skip
        knobs = {"max_num_seqs": 8, "speculative": speculative}
        self.emit(Snapshot, num_blocks=64, block_size=16, ref_counts=[0] * 64, cached={}, lru=[], requests=[], knobs=knobs)

    def emit(self, kind: type[Event], **fields: Any) -> None:
        self.log.append(kind(step=self.step, time_ns=time.monotonic_ns(), **fields))

    def knob(self, name: str, new: Any) -> None:
        self.emit(KnobChanged, name=name, old=self.spec if name == "speculative" else None, new=new)
        if name == "speculative":
            self.spec = new

    def add(self, request_id: str, temperature: float = 1.0, seed: int = 3, prompt: str = "once upon", **sampling: Any) -> None:
        ids = [ord(c) % VOCAB for c in prompt]
        params = {"temperature": temperature, "top_p": 1.0, "max_tokens": 64, "seed": seed, **sampling}
        self.emit(RequestAdded, request_id=request_id, owner="ann", prompt_token_ids=ids, prompt_text=prompt, sampling=params)
        self.lengths[request_id] = len(ids)
        self.temperatures[request_id] = temperature
        self.step += 1
        self.token(request_id, 0)
        self.done([Run(request_id, "prefill", 0, len(ids), True)], 0.0, 20.0)

    def token(self, request_id: str, token_id: int) -> None:
        at = self.lengths[request_id]
        self.emit(
            TokenSampled, request_id=request_id, position=at, index=0, token_id=token_id, text=TEXTS[token_id], logprob=-1.0, rank=1,
            u=0.5, prob=0.4, nucleus_size=3, nucleus_mass=1.0, entropy=1.0,
        )  # fmt: skip
        self.lengths[request_id] = at + 1

    def done(self, runs: list[Run], draft_ms: float, step_ms: float) -> None:
        self.emit(
            StepDone, runs=runs, num_waiting=0, num_running=len(runs), token_budget=512, max_num_seqs=8, used_blocks=1,
            cached_free_blocks=0, schedule_ms=0.1, draft_ms=draft_ms, forward_ms=step_ms - draft_ms - 0.5, sample_ms=0.3, commit_ms=0.1,
            step_ms=step_ms + 0.2, record_ms=0.2, flops=1e6, weight_bytes=1e6, kv_read_bytes=1.0, kv_write_bytes=1.0,
        )  # fmt: skip

    def plain(self, *request_ids: str, steps: int = 1, ms: float = 10.0) -> None:
        for _ in range(steps):
            self.step += 1
            runs = []
            for request_id in request_ids:
                runs.append(Run(request_id, "decode", self.lengths[request_id] - 1, 1, True))
                self.token(request_id, self.random.randrange(VOCAB))
            self.done(runs, 0.0, ms)

    def finish(self, request_id: str, reason: str = "length") -> None:
        self.emit(RequestFinished, request_id=request_id, reason=reason, num_output_tokens=self.lengths[request_id])

    def spec_step(
        self, *request_ids: str, accepted: int = 2, k: int = 4, parents: list[int] | None = None, path: list[int] | None = None,
        method: str | None = None, rule: str = "rejection", ms: float | None = None, empty: bool = False,
    ) -> None:  # fmt: skip
        """One step: a chain of ``k`` of which ``accepted`` are kept, or a tree with ``path`` kept."""
        self.step += 1
        method = method or (self.spec or {}).get("method", "eagle")
        parents = list(range(-1, k - 1)) if parents is None else parents
        path = list(range(accepted)) if path is None else path
        n = 0 if empty else len(parents)
        draft_ms, runs = 0.5 * n, []
        for request_id in request_ids:
            nodes = [] if empty else self._nodes(parents, method)
            at = self.lengths[request_id]
            self.emit(
                DraftProposed, request_id=request_id, method=method, position=at, num_wanted=len(parents), nodes=nodes,
                sampled=rule == "rejection", draft_ms=draft_ms, batch_size=len(request_ids),
            )  # fmt: skip
            if empty:
                self.token(request_id, 1)
                runs.append(Run(request_id, "decode", at - 1, 1, True))
                continue
            self._verify(request_id, nodes, path, rule, 10.0 + n)
            runs.append(Run(request_id, "decode", at - 1, 1 + n, True, n, len(path)))
        self.done(runs, draft_ms, draft_ms + (10.0 + n if ms is None else ms))

    def _nodes(self, parents: list[int], method: str) -> list[DraftNode]:
        nodes = []
        for parent in parents:
            token = self.random.randrange(VOCAB)
            q = math.nan if method == "ngram" else 0.5
            tops = [token, (token + 1) % VOCAB]
            nodes.append(DraftNode(token, TEXTS[token], parent, q, tops, [TEXTS[t] for t in tops], [0.5, 0.25]))
        return nodes

    def _verify(self, request_id: str, nodes: list[DraftNode], path: list[int], rule: str, ms: float) -> None:
        at = self.lengths[request_id]
        last = path[-1] if path else -1
        own = "corrected" if any(n.parent == last for n in nodes) else "bonus"
        seen = [self._node(i, n, path, last, rule) for i, n in enumerate(nodes)]
        token = (nodes[-1].token_id + 2) % VOCAB
        corrected = own == "corrected" and rule == "rejection"
        self.emit(
            DraftVerified, request_id=request_id, position=at, rule=rule, nodes=seen, path=path, token_id=token, text=TEXTS[token], own=own,
            own_u=0.3, own_prob=0.6, residual_ids=[token, 0] if corrected else [], residual_texts=[TEXTS[token], TEXTS[0]] if corrected else [],
            residual_probs=[0.6, 0.4] if corrected else [], residual_mass=0.5 if corrected else 0.0, verify_ms=ms, num_kept=len(path) + 1,
        )  # fmt: skip
        for i in path:
            self.token(request_id, nodes[i].token_id)
        self.token(request_id, token)

    @staticmethod
    def _node(i: int, n: DraftNode, path: list[int], last: int, rule: str) -> VerifiedNode:
        outcome = "accepted" if i in path else "rejected" if n.parent == last else "not reached"
        p = 0.75 if outcome == "accepted" else 0.25
        if outcome == "not reached":
            return VerifiedNode(outcome, p, math.nan, None, math.nan)
        tops = [n.token_id, (n.token_id + 3) % VOCAB]
        q, u = (0.5, 0.3 if outcome == "accepted" else 0.8) if rule == "rejection" else (math.nan, None)
        accept = min(1.0, p / 0.5) if rule == "rejection" else p
        return VerifiedNode(outcome, p, q, u, accept, tops, [TEXTS[t] for t in tops], [p, 1 - p])
