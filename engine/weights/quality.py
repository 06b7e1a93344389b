"""Quality of the running weights and KV dtype, as one event; see ``engine.quantization.quality`` for what is measured."""

import time
from typing import TYPE_CHECKING, Any

from engine.loading import make_kv_cache, make_runner
from engine.quantization.quality.forward import ModelLogits
from engine.quantization.quality.measure import ARITHMETIC, RETRIEVAL, Budget, Quality, measure_quality, measure_reference
from engine.quantization.quality.probes import arithmetic_prompt, retrieval_prompt
from engine.quantization.quality.reference import Reference
from engine.request import Request, SamplingParams
from engine.runner import Runner, Scheduled
from engine.weights.original import Originals

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.weights.studies import Study

_CHUNK = 128  # tokens that the model reads at a time with a KV cache in few bits: it then reads most of them back rounded
_DECODED = 24
_PROMPT = 43  # tokens before those that are timed


class Measurement:
    """One measurement. ``reference``: kept from an earlier one, and for the next."""

    def __init__(self, engine: "Engine", reference: "tuple[Quality, Reference] | None") -> None:
        self.engine, self.reference = engine, reference
        self.parts, self.config = engine.parts, engine.config
        self.model = engine.parts.model.apart()  # what runs when it is asked
        self.facts = engine.parts.weights.facts()
        self.budget = self._fitting()
        self.plain = not self.facts["method"] and not engine.parts.checkpoint.quantized and self.config.kv_cache_dtype == "auto"

    def _fitting(self) -> Budget:
        """The default measurement, or what of it fits the model's context. Its tokenizer may need more tokens for the same words."""
        room, usual, tokenizer = self.parts.model_config.max_position_embeddings, Budget(), self.parts.tokenizer
        arithmetic = max(len(arithmetic_prompt(tokenizer, digits, "0 0").token_ids) for digits in (1, 2)) <= min(room, 512)
        return Budget(
            window=min(usual.window, room), stride=min(usual.stride, max(1, room // 2)),
            retrieval=tuple(n for n in usual.retrieval if n <= room and self._can_ask(n)),
            arithmetic=usual.arithmetic if arithmetic else 0,
        )  # fmt: skip

    def _can_ask(self, length: int) -> bool:
        try:
            retrieval_prompt(self.parts.tokenizer, length, "0 0")
        except ValueError:  # the keys alone need more tokens
            return False
        return True

    def run(self, study: "Study") -> dict[str, Any]:
        """The fields of a QualityMeasured, but for the speed."""
        began = time.perf_counter()
        if self.reference is None:
            study.doing = "measuring the checkpoint's own weights"
            own = self.model if self.plain else Originals(self.parts).whole()
            self.reference = measure_reference(self._logits(own, "auto"), self.parts.tokenizer, self.budget, study.progress)
        study.doing = "measuring"
        if self.plain:
            quality, divergence = self.reference[0], None
        else:
            logits = self._logits(self.model, self.config.kv_cache_dtype)
            quality = measure_quality(logits, self.parts.tokenizer, self.reference[1], self.budget, study.progress)
            divergence = quality.divergence
        probes = quality.probes
        return {
            **{name: self.facts[name] for name in ("method", "group_size", "options", "bits_per_weight", "linear_bytes", "other_bytes")},
            "kv_cache_dtype": self.config.kv_cache_dtype,
            "perplexity": {name: found.perplexity for name, found in quality.perplexities.items()},
            "perplexity_tokens": {name: found.tokens for name, found in quality.perplexities.items()},
            "window": self.budget.window, "stride": self.budget.stride,
            "kl_mean": 0.0 if divergence is None else divergence.mean_kl,
            "kl_p99": 0.0 if divergence is None else divergence.kl_quantile(0.99),
            "kl_positions": self.budget.positions, "top1_agreement": 1.0 if divergence is None else divergence.top1_agreement,
            "retrieval": probes[RETRIEVAL].total.exact if RETRIEVAL in probes else float("nan"),
            "retrieval_items": probes[RETRIEVAL].total.answers if RETRIEVAL in probes else 0,
            "arithmetic": probes[ARITHMETIC].total.exact if ARITHMETIC in probes else float("nan"),
            "arithmetic_items": probes[ARITHMETIC].total.answers if ARITHMETIC in probes else 0,
            "decode_tokens_per_s": float("nan"), "seconds": time.perf_counter() - began,
        }  # fmt: skip

    def _logits(self, model: Any, kv_cache_dtype: str) -> ModelLogits:
        blocks = -(-self.budget.longest // self.config.block_size)
        config = self.config.changed(num_kv_blocks=blocks, kv_cache_dtype=kv_cache_dtype, max_num_seqs=1)
        runner = make_runner(self.parts, make_kv_cache(self.parts, config), config)
        return ModelLogits(
            Runner(model, runner.kv, runner.attention), None if kv_cache_dtype == "auto" else min(_CHUNK, self.budget.window)
        )

    def time_decode(self, fields: dict[str, Any]) -> None:
        """How fast one request decodes, as the engine itself would: in the engine's own thread."""
        if self.parts.weights.facts() != self.facts:
            return  # other weights run by now
        count = _PROMPT + _DECODED
        if count > self.parts.model_config.max_position_embeddings:
            return
        config = self.config.changed(num_kv_blocks=-(-count // self.config.block_size), max_num_seqs=1)
        runner = make_runner(self.parts, make_kv_cache(self.parts, config), config)
        request = Request("speed", [(7 * i + 11) % self.parts.model_config.vocab_size for i in range(count)], SamplingParams(), 0)
        request.block_ids = list(range(config.num_kv_blocks or 0))
        runner.run([Scheduled(request, 0, _PROMPT, True)])
        begun = time.perf_counter()
        for i in range(_PROMPT, count):
            runner.run([Scheduled(request, i, 1, True)])
        fields["decode_tokens_per_s"] = _DECODED / (time.perf_counter() - begun)
