"""Whether the values of a saved run can be true: of the right type they are already (``engine.events.codec``).

Views reckon with them, so a run with blocks of no tokens or with a list as its temperature is refused when it is opened.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from engine.events.types import EngineStarted
from engine.request import SamplingParams
from explorer.i18n import _

# What may be missing or None (not known then), but is counted from 1 where it is there.
CONFIG = ("block_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
MODEL = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "num_kv_heads", "head_dim", "intermediate_size")
LARGEST = 1 << 48


def check_engine(started: EngineStarted | None) -> None:
    """ValueError that names what no engine has."""
    if started is None:
        return
    for what, values, names in (("config", started.config, CONFIG), ("model", started.model, MODEL)):
        for name in names:
            value = values.get(name)
            if value is not None and not _count(value, 1):
                raise ValueError(_wrong(f"{what}.{name}", value, 1))
    for name in ("kv_bytes_per_block", "kv_pool_bytes"):
        if not _count(getattr(started, name), 0):
            raise ValueError(_wrong(name, getattr(started, name), 0))


def check_sampling(requests: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Of (request id, what it was sampled with): ValueError that names a request that no engine would have taken."""
    for request_id, sampling in requests:
        try:
            SamplingParams(**sampling)
        except (ValueError, TypeError) as error:  # a value, a name
            raise ValueError(
                _("request {request}: {error}").format(request=f"{request_id:.60}", error=f"{error!s:.300}")
            ) from None


def _count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def _wrong(name: str, value: Any, least: int) -> str:
    return _("{name} must be a whole number from {least} on, got {value}").format(name=name, least=least, value=f"{value!r:.60}")
