"""Engines for tests: a tiny random model with a tokenizer, loaded once; and a look at everything after each step."""

import functools
import tempfile
from pathlib import Path
from typing import Any

from engine import Engine, EngineConfig
from engine.events.state import State
from engine.loading import Parts, load_parts
from tests.engine.model import tiny


def write_byte_tokenizer(folder: Path) -> None:
    """tokenizer.json with a token for each byte (3..258) after three special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(specials + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))


@functools.cache
def tiny_parts(family: str = "llama") -> tuple[Parts, Any]:
    """(loaded parts of a tiny float32 checkpoint with a byte-level tokenizer, its transformers model)."""
    folder = Path(tempfile.mkdtemp(prefix="cutaway-tiny-"))
    made = tiny.make(family, folder)
    write_byte_tokenizer(folder)
    return load_parts(EngineConfig(model=str(made.path), dtype="float32", device="cpu")), made


def tiny_engine(family: str = "llama", **config: Any) -> Engine:
    parts, made = tiny_parts(family)
    defaults = {
        "model": str(made.path),
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 128,
        "num_kv_blocks": 64,
        "block_size": 4,
    }
    return Engine(EngineConfig(**{**defaults, **config}), parts=parts)


class Checked:
    """Steps an engine and checks after every step that it is whole: integrity, the log's replayed state, NaN in free blocks."""

    def __init__(self, engine: Engine, poison: bool = True) -> None:
        self.engine = engine
        self.poison = poison
        self.events: list = []
        self.state = State()
        for event in (engine.started_event(), engine.snapshot()):
            self._sink(event)
        engine.recorder.attach(self._sink)
        engine.watch("tokens", top=0)

    def _sink(self, event: Any) -> None:
        self.events.append(event)
        self.state.apply(event)

    def step(self) -> list:
        outputs = self.engine.step()
        self.check()
        return outputs

    def check(self) -> None:
        engine = self.engine
        engine.check_integrity()
        self.compare_state()
        if self.poison:
            free = [b for b in range(engine.pool.num_blocks) if engine.pool.ref_counts[b] == 0 and b not in engine.pool.index]
            engine.kv.fill_blocks(free, float("nan"))

    def compare_state(self) -> None:
        """The state rebuilt from deltas alone equals the engine's own."""
        want = self.engine.snapshot()
        state = self.state
        assert state.num_blocks == want.num_blocks and state.block_size == want.block_size
        assert list(state.ref_counts) == want.ref_counts
        assert dict(state.cached) == want.cached
        assert list(state.lru) == want.lru
        live = {r.request_id: r for r in want.requests if r.status != "finished"}
        for request in want.requests:
            if request.status == "finished" and request.request_id not in live:  # its place in a static batch is still taken
                assert list(state.requests[request.request_id].block_ids) == request.block_ids, request.request_id
        assert {i for i, r in state.requests.items() if r.status != "finished"} == set(live)
        for request_id, request in live.items():
            view = state.requests[request_id]
            assert view.status == request.status, request_id
            assert list(view.block_ids) == request.block_ids, request_id
            assert view.num_computed_tokens == request.num_computed_tokens, request_id
            assert view.num_swapped_tokens == request.num_swapped_tokens, request_id
            assert list(view.output_token_ids) == request.output_token_ids, request_id

    def run(self, limit: int = 2000) -> dict[str, Any]:
        """Step to the end; RequestOutput by id."""
        done = {}
        for _ in range(limit):
            if not self.engine.has_unfinished():
                return done
            for output in self.step():
                if output.request is not None:
                    done[output.request_id] = output.request
        raise AssertionError(f"not finished after {limit} steps")
