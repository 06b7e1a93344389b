"""What the engine's process and its parent say to each other: tagged msgspec structs in MessagePack, one message a frame.

Nothing is pickled. A frame that does not decode is a ValueError. Commands go to the engine, the others come from it.
"""

from typing import Any, TypeAlias

import msgspec

from engine.events.types import AnyEvent, EngineStarted

MAX_FRAME = 256 << 20  # bytes


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="message"):
    pass


# -- commands -----------------------------------------------------------------------------------------------------------


class AddRequest(Message, frozen=True):
    request_id: str
    prompt: str | list[int]
    sampling: dict[str, Any]  # SamplingParams
    owner: str
    cache_salt: str | None = None
    messages: list[dict[str, str]] = []  # a conversation for the checkpoint's chat template, instead of a prompt
    priority: int = 0


class Branch(Message, frozen=True):
    """A new request that goes on from another's tokens with one of them replaced, see ``Engine.branch``."""

    request_id: str  # of the new one
    source_id: str
    position: int
    token_id: int
    sampling: dict[str, Any] | None  # SamplingParams; None: the source's
    owner: str


class Abort(Message, frozen=True):
    request_id: str


class AbortOwner(Message, frozen=True):
    owner: str


class Reconfigure(Message, frozen=True):
    knobs: dict[str, Any]
    by: str = ""


class UpdateSampling(Message, frozen=True):
    request_id: str
    changes: dict[str, Any]
    by: str = ""


class Watch(Message, frozen=True):
    kind: str
    request_id: str | None = None
    options: dict[str, Any] = {}
    on: bool = True


class MeasureCache(Message, frozen=True):
    lengths: list[int]


class Study(Message, frozen=True):
    """Measure something of the weights: one of ``STUDIES``, a method of Engine; the answer is an event."""

    what: str
    options: dict[str, Any] = {}


STUDIES = (
    "observe_matrix",
    "observe_kv",
    "observe_prefix",
    "probe_quantization",
    "measure_quality",
    "trace_attention",
    "cancel_quantization",
    "measure_roofs",
    "measure_memory",
)


class Observe(Message, frozen=True):
    """Whether events are wanted at all. Switched on, they start with a Snapshot."""

    on: bool


class Pause(Message, frozen=True):
    pass


class Resume(Message, frozen=True):
    pass


class Step(Message, frozen=True):
    """Pause after ``count`` more steps."""

    count: int


class Stop(Message, frozen=True):
    pass


Command: TypeAlias = (
    AddRequest
    | Branch
    | Abort
    | AbortOwner
    | Reconfigure
    | UpdateSampling
    | Watch
    | MeasureCache
    | Study
    | Observe
    | Pause
    | Resume
    | Step
    | Stop
)


# -- from the engine ------------------------------------------------------------------------------------------------------


class Loading(Message, frozen=True):
    """How far the start is."""

    text: str
    done: float | None = None  # 0 to 1, where it is known


class Ready(Message, frozen=True):
    started: EngineStarted


class Events(Message, frozen=True):
    """What was recorded since the last batch.

    ``dropped``: events lost before these because the parent did not read; the first of these is then a Snapshot.
    """

    events: list[AnyEvent]
    dropped: int = 0


class TextPiece(Message, frozen=True):
    """Text that one sequence gained."""

    request_id: str
    index: int  # which of n
    text: str
    num_tokens: int  # tokens behind the piece


class Finished(Message, frozen=True):
    """One sequence ended; ``last`` when its siblings (n > 1) have ended too."""

    request_id: str
    index: int
    reason: str
    detail: str  # why
    token_ids: list[int]
    text: str
    num_cached_tokens: int = 0
    last: bool = True


class Rejected(Message, frozen=True):
    """A command was refused; the engine goes on as before."""

    command: str  # its type's name
    request_id: str  # "" when the command is not about one
    error: str


class LoopState(Message, frozen=True):
    """Whether the loop runs, after a command that changed it."""

    paused: bool
    step: int


class Died(Message, frozen=True):
    """The process ended and was not asked to. Made by the parent."""

    error: str
    returncode: int | None
    stderr: str  # its last lines
    request_ids: list[str]  # the requests that are lost


class Batch(Message, frozen=True):
    """A frame with several messages."""

    messages: "list[Loading | Ready | Events | TextPiece | Finished | Rejected | LoopState]"


FromEngine: TypeAlias = Loading | Ready | Events | TextPiece | Finished | Rejected | LoopState | Died

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Command)
_batches: msgspec.msgpack.Decoder[Batch] = msgspec.msgpack.Decoder(Batch)


def encode(message: Message) -> bytes:
    """ValueError for a value that is not plain (an unknown type, text with a lone surrogate, an integer beyond 64 bits)."""
    try:
        return _encoder.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise ValueError(f"{type(message).__name__} cannot be sent: {error}") from None


def encode_command(command: Command) -> bytes:
    """``encode``, and ValueError for what the engine could not read: a field of another type, a frame larger than MAX_FRAME."""
    frame = encode(command)
    if len(frame) > MAX_FRAME:
        raise ValueError(f"{type(command).__name__} takes {len(frame):,} bytes, at most {MAX_FRAME:,} can be sent")
    try:
        _commands.decode(frame)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{type(command).__name__} cannot be sent: {error}") from None
    return frame


def decode_command(frame: bytes) -> Command:
    return _decode(_commands, frame)


def decode_batch(frame: bytes) -> Batch:
    return _decode(_batches, frame)


def _decode(decoder: Any, frame: bytes) -> Any:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"a frame of {len(frame)} bytes is no message: {error}") from None
