"""Events of the prefix cache as a tree, and of KV in host memory. See ``engine.events.types`` for what holds for all events."""

import msgspec

from engine.events.event import Event


class PrefixTreeNode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of cached tokens that no path leaves: of the radix index a node, of the hash index a chain of whole blocks."""

    node_id: int  # while the node lives it keeps its id; of the hash index the run's first block
    parent_id: int  # the node that it follows; -1: none (the beginning of a prompt, or its beginning is not cached any more)
    depth: int  # tokens before it on its path
    num_tokens: int
    token_ids: list[int]  # its first ones, at most as many as were asked for
    text: str  # of these
    block_ids: list[int]  # the blocks that end in it, in order
    hits: int  # admissions that took KV from it
    last_used_ns: int  # the latest of them, or when it came to be; monotonic, as ``time_ns``
    num_held: int  # of its blocks, those that a request holds now: they are not evicted
    holders: list[str]  # the requests that hold any of its blocks, at most 16 of them
    reachable: bool  # False: what comes before it was evicted, so that no prompt finds it until that is computed again
    root_hash: int  # of the tree it is in: 0 without a salt; not reachable: the hash of the evicted block before it


class PrefixTree(Event, frozen=True, kw_only=True):
    """All that the prefix index can find, as a tree. Recorded under ``observe_prefix``."""

    index: str  # EngineConfig.prefix_index: "hash" | "radix"
    enabled: bool  # EngineConfig.enable_prefix_caching
    block_size: int
    num_blocks: int  # of the pool
    num_cached_blocks: int
    num_evictable_blocks: int  # cached, and nobody holds them
    num_nodes: int  # all there are
    nodes: list[PrefixTreeNode]  # parents before children; of more than were asked for, the most used ones
    num_lookups: int  # since the pool was built, first admissions only (not of preempted requests that came back)
    num_asked_tokens: int  # of these lookups
    num_hit_tokens: int


class BlockSwapped(Event, frozen=True, kw_only=True):
    """KV of a preempted request was copied to host memory, copied back, or given up there.

    "out": follows its RequestPreempted, before its BlockFreed. "in": when it is admitted again, after its PrefixLookup and the
    BlockAllocated of the blocks that are copied to, before the step's forward pass; what the prefix index still had is shared
    and not copied. "dropped": it will not be copied back, and ``reason`` says why.
    """

    request_id: str
    direction: str  # "out" | "in" | "dropped"
    block_ids: list[int]  # out: copied from; in: copied to; dropped: []
    num_tokens: int  # whose KV it is: all that was computed of the request
    num_bytes: int  # what the host copy takes, or took
    used_bytes: int  # of host memory by all swapped requests, afterwards
    budget_bytes: int  # EngineConfig.swap_space
    copy_ms: float  # wall time of the copy; dropped: 0
    reason: str = ""  # dropped: "finished" | "weights changed" | "pool rebuilt" | "found by prefix" | "budget lowered"
