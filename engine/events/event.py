"""What all events have."""

import msgspec


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="kind", kw_only=True, gc=False):
    step: int
    time_ns: int
