"""The prefix indexes, by name, and what either of them holds as a tree."""

from collections.abc import Iterable

from engine.kvcache.prefix import PrefixIndex
from engine.kvcache.radix import RadixIndex

Index = PrefixIndex | RadixIndex

PREFIX_INDEXES: dict[str, type[PrefixIndex] | type[RadixIndex]] = {"hash": PrefixIndex, "radix": RadixIndex}


def make_index(name: str, block_size: int) -> Index:
    """``name``: EngineConfig.prefix_index. ValueError for another one."""
    if name not in PREFIX_INDEXES:
        raise ValueError(f"prefix_index must be one of {tuple(PREFIX_INDEXES)}, got {name!r}")
    return PREFIX_INDEXES[name](block_size)


def converted(old: Index, name: str, lru: Iterable[int]) -> Index:
    """An index of this name that finds all that ``old`` does, nothing locked, its counts of uses at 0.

    ``lru``: the blocks that nobody holds, in the order in which they are to go. What was evicted, and which salts there were, stays known.
    """
    new = make_index(name, old.block_size)
    order = {block: i for i, block in enumerate(lru)}
    for entry in sorted(old.entries(), key=lambda entry: order.get(entry[0], len(order))):
        new.insert(*entry)
    new.remember(old)
    return new
