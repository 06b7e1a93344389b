"""Events of a real BlockPool under hand-made requests, with no model: what the page's tests and its bench feed on."""

from engine.events.recorder import Recorder
from engine.events.types import (
    EngineStarted,
    Event,
    PrefixLookup,
    RequestAdded,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    Run,
    Snapshot,
    StepDone,
)
from engine.kvcache.pool import BlockPool
from engine.kvcache.prefix import ROOT, block_hash

MODEL = {
    "architecture": "llama", "num_layers": 30, "num_attention_heads": 9, "num_kv_heads": 3, "head_dim": 64, "hidden_size": 576,
    "intermediate_size": 1536, "vocab_size": 49152, "num_parameters": 134_515_008, "num_embedding_parameters": 28_311_552,
}  # fmt: skip
BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4


class PoolSim:
    """A pool, and requests that take from it. ``events`` grows; ``step()`` closes a step."""

    def __init__(self, num_blocks: int = 32, block_size: int = 4, max_model_len: int = 64) -> None:
        self.events: list[Event] = []
        self.recorder = Recorder()
        self.pool = BlockPool(num_blocks, block_size, self.recorder)
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self._runs: list[Run] = []
        self.recorder.attach(self.events.append)
        config = {"num_kv_blocks": num_blocks, "block_size": block_size, "max_model_len": max_model_len, "max_num_seqs": 8}
        self.recorder.emit(
            EngineStarted, config=config, model=MODEL, device={"dtype": "float32", "device": "cpu"}, versions={},
            kv_bytes_per_block=block_size * BYTES_PER_TOKEN, kv_pool_bytes=num_blocks * block_size * BYTES_PER_TOKEN,
        )  # fmt: skip
        self.recorder.emit(
            Snapshot, num_blocks=num_blocks, block_size=block_size, ref_counts=[0] * num_blocks, cached={}, lru=[], requests=[],
            knobs={"max_num_seqs": 8, "enable_prefix_caching": True, "num_kv_blocks": num_blocks, "block_size": block_size},
        )  # fmt: skip

    def add(self, request_id: str, tokens: list[int], owner: str = "ann", n: int = 1) -> None:
        self.tokens[request_id], self.prompts[request_id] = list(tokens), len(tokens)
        self.recorder.emit(
            RequestAdded, request_id=request_id, owner=owner, prompt_token_ids=list(tokens), prompt_text="", sampling={"n": n}
        )

    def prefill(self, request_id: str) -> None:
        """Admit it: look up its prefix, take blocks for the rest, compute all of it."""
        tokens, size = self.tokens[request_id], self.pool.block_size
        match = self.pool.index.match(tokens, self._hashes(tokens), ROOT)
        hit = len(match.block_ids) * size
        self.recorder.emit(
            PrefixLookup, request_id=request_id, num_tokens=len(tokens), num_hit_tokens=hit, block_ids=match.block_ids,
            miss_reason=match.miss_reason,
        )  # fmt: skip
        self.pool.share(request_id, 0, match.block_ids)
        self.tables[request_id], self.computed[request_id] = list(match.block_ids), hit
        self._compute(request_id, len(tokens) - hit, "prefill")

    def decode(self, request_id: str, token: int = 7) -> None:
        """One more token: the sampled one enters the cache."""
        self.tokens[request_id].append(token)
        index, offset = divmod(self.computed[request_id], self.pool.block_size)
        table = self.tables[request_id]
        if offset and self.pool.ref_counts[table[index]] > 1:
            table[index] = self.pool.copy_on_write(request_id, index, table[index])
        self._compute(request_id, 1, "decode")

    def fork(self, parent: str, child: str, owner: str = "ann") -> None:
        self.tokens[child], self.prompts[child] = list(self.tokens[parent]), self.prompts[parent]
        self.recorder.emit(
            RequestAdded, request_id=child, owner=owner, prompt_token_ids=list(self.tokens[parent]), prompt_text="", sampling={},
            parent_id=parent, sample_index=1,
        )  # fmt: skip
        self.tables[child], self.computed[child] = list(self.tables[parent]), self.computed[parent]
        self.pool.share(child, 0, self.tables[child])
        self.recorder.emit(
            RequestForked,
            request_id=child,
            parent_id=parent,
            block_ids=list(self.tables[child]),
            num_computed_tokens=self.computed[child],
        )

    def finish(self, request_id: str) -> None:
        self.pool.free(request_id, self.tables.pop(request_id))
        out = len(self.tokens[request_id]) - self.prompts[request_id]
        del self.computed[request_id]
        self.recorder.emit(RequestFinished, request_id=request_id, reason="length", num_output_tokens=out)

    def preempt(self, request_id: str, for_request_id: str) -> None:
        self.recorder.emit(
            RequestPreempted,
            request_id=request_id,
            num_computed_tokens=self.computed.pop(request_id),
            for_request_id=for_request_id,
        )
        self.pool.free(request_id, self.tables.pop(request_id))

    def step(self) -> int:
        """Close the step under way with its StepDone; returns its number. Events before the first belong to step 0."""
        self.recorder.emit(
            StepDone, runs=self._runs, num_waiting=0, num_running=len(self.tables), token_budget=512, max_num_seqs=8,
            used_blocks=self.pool.num_used, cached_free_blocks=self.pool.num_cached_free, schedule_ms=0.1, forward_ms=1.0, sample_ms=0.1,
            commit_ms=0.1, step_ms=1.3, record_ms=0.0, flops=0.0, weight_bytes=0.0, kv_read_bytes=0.0, kv_write_bytes=0.0,
        )  # fmt: skip
        self._runs = []
        self.pool.check_integrity(self.tables)
        self.recorder.step += 1
        return self.recorder.step - 1

    def _hashes(self, tokens: list[int]) -> list[int]:
        size, hashes = self.pool.block_size, []
        for i in range(len(tokens) // size):
            hashes.append(block_hash(hashes[-1] if i else ROOT, tokens[i * size : (i + 1) * size]))
        return hashes

    def _compute(self, request_id: str, count: int, phase: str) -> None:
        size, table, start = self.pool.block_size, self.tables[request_id], self.computed[request_id]
        end = start + count
        needed = -(-end // size) - len(table)
        if needed:
            table += self.pool.allocate(request_id, len(table), needed, table[-1] if table else None)
        self.computed[request_id] = end
        hashes = self._hashes(self.tokens[request_id])
        for i in range(start // size, end // size):
            tokens = tuple(self.tokens[request_id][i * size : (i + 1) * size])
            self.pool.cache(table[i], hashes[i], hashes[i - 1] if i else ROOT, tokens)
        self._runs.append(Run(request_id, phase, start, count, True))
