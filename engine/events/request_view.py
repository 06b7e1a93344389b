"""One request as the events tell it."""

import copy
from typing import Any

import msgspec

from engine.events.types import RequestState

UNSEEN = -1  # stands for an output token that was not watched


class ReqView(msgspec.Struct, kw_only=True, gc=False):
    """One request as the events tell it.

    ``output_token_ids`` holds UNSEEN where nobody watched tokens; ``num_output_tokens`` is right all the same.
    ``output_texts`` are the texts of the tokens seen, one each; ``output_text`` joins them, so a character that is split over two
    tokens shows as replacement characters (the exact text travels beside the events).
    """

    request_id: str
    owner: str
    status: str  # "waiting" | "running" | "preempted" | "finished"
    prompt_token_ids: list[int]
    prompt_text: str
    sampling: dict[str, Any]
    output_token_ids: list[int] = []
    output_texts: list[str] = []
    num_output_tokens: int = 0
    num_computed_tokens: int = 0  # positions whose KV is in the pool
    block_ids: list[int] = []  # the block table: logical index -> physical block
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache gave at admission
    num_preemptions: int = 0
    parent_id: str | None = None
    sample_index: int = 0
    arrived_ns: int = 0
    arrived_step: int = 0
    finished_step: int | None = None
    finish_reason: str | None = None
    message: str = ""
    branched_from: str | None = None
    branched_at: int = -1
    num_swapped_tokens: int = 0  # positions whose KV lies in host memory

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt_token_ids) + self.num_output_tokens

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output; UNSEEN where a token was not watched."""
        return self.prompt_token_ids + self.output_token_ids + [UNSEEN] * (self.num_output_tokens - len(self.output_token_ids))

    @property
    def output_text(self) -> str:
        return "".join(self.output_texts)

    def own_copy(self) -> "ReqView":
        """A copy whose changing lists are its own (prompt and sampling are never changed in place)."""
        view = copy.copy(self)
        view.output_token_ids = self.output_token_ids.copy()
        view.output_texts = self.output_texts.copy()
        view.block_ids = self.block_ids.copy()
        return view

    def to_state(self) -> RequestState:
        """As a Snapshot holds it."""
        unseen = [UNSEEN] * (self.num_output_tokens - len(self.output_token_ids))
        return RequestState(
            request_id=self.request_id,
            owner=self.owner,
            status=self.status,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids + unseen,
            prompt_text=self.prompt_text,
            output_text=self.output_text,
            sampling=self.sampling,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=self.block_ids.copy(),
            num_cached_tokens=self.num_cached_tokens,
            parent_id=self.parent_id,
            sample_index=self.sample_index,
            arrived_ns=self.arrived_ns,
            finish_reason=self.finish_reason,
            message=self.message,
            branched_from=self.branched_from,
            branched_at=self.branched_at,
            num_swapped_tokens=self.num_swapped_tokens,
        )

    @classmethod
    def from_state(cls, r: RequestState, old: "ReqView | None") -> "ReqView":
        """From a Snapshot; ``old`` is what was known of it before and gives what a Snapshot does not say."""
        return cls(
            request_id=r.request_id,
            owner=r.owner,
            status=r.status,
            prompt_token_ids=r.prompt_token_ids,
            prompt_text=r.prompt_text,
            sampling=r.sampling,
            output_token_ids=r.output_token_ids.copy(),
            output_texts=[r.output_text] if r.output_text else [],
            num_output_tokens=len(r.output_token_ids),
            num_computed_tokens=r.num_computed_tokens,
            block_ids=r.block_ids.copy(),
            num_cached_tokens=r.num_cached_tokens,
            num_preemptions=old.num_preemptions if old else 0,
            parent_id=r.parent_id,
            sample_index=r.sample_index,
            arrived_ns=r.arrived_ns,
            arrived_step=old.arrived_step if old else 0,
            finished_step=old.finished_step if old else None,
            finish_reason=r.finish_reason,
            message=r.message,
            branched_from=r.branched_from,
            branched_at=r.branched_at,
            num_swapped_tokens=r.num_swapped_tokens,
        )
