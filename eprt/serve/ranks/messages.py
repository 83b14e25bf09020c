"""What the HTTP frontend and the ranks say to each other: msgpack, one tagged struct per message.

Frontend to rank: Add, Wake, Abort, Migrate, Cancel, Sample, Stop. Rank to frontend: Hello, Ready, Step, Sampled, Drain,
Fault, Fatal, Bye.

`seq` counts the frontend's Adds, Migrates and its Stop. The rank that is given the request gets Add(seq), every other
rank Wake(seq): each rank knows from its own connection alone which seq it has seen. The ranks may only fall asleep, or
leave, when all of them have seen the same seq (the engine's step agrees on it), so nobody sleeps through a wake-up.
"""

import struct

import msgspec

from eprt.engine.outputs import EngineStats, TokenOutput
from eprt.engine.sampling_params import SamplingParams
from eprt.ep.migration.job import MigrationJob


class EngineInfo(msgspec.Struct, frozen=True):
    """What the frontend must know of one rank's loaded model.

    max_model_len: tokens of prompt and completion together. kv_tokens: tokens this rank's cache can hold.
    node_of_rank: node index of each rank.
    moe_layers: model layer index of each row of EngineStats.slot_tokens; the MTP layer's last, where it is loaded.
    expert_of_slot: per MoE layer, the logical expert in each of this rank's slots at the start, -1 for none.
    spare_experts: how many may be on their way to this rank at once, 0 where experts cannot move. expert_bytes: of one
    expert's weights and scales, in the layer where it has most. Everything but expert_of_slot is equal on all ranks.
    """

    model_type: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    kv_tokens: int
    node_of_rank: tuple[int, ...]
    num_experts: int
    moe_layers: tuple[int, ...]
    expert_of_slot: list[list[int]]
    dtype: str
    spare_experts: int = 0
    expert_bytes: int = 0


class SlotTotals(msgspec.Struct, frozen=True, array_like=True):
    """Of each of a rank's expert slots, per MoE layer: the logical expert it holds now (-1: none), and the tokens it
    was given since the start, whichever expert it held. epoch: of the placement."""

    epoch: int
    expert_of_slot: list[list[int]]
    rows: list[list[int]]


class WaitTotals(msgspec.Struct, frozen=True, array_like=True):
    """What a rank's backends counted since they started, all modes together; names as in eprt.ep.stats.EPStats."""

    num_calls: int
    dispatch_wait_us: list[float]
    combine_wait_us: list[float]
    recv_tokens: list[int]
    sent_tokens: list[int]
    compute_us: float
    slots: SlotTotals | None = None
    blocked_us: float | None = None


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Add(_Message, frozen=True):
    """Run this request. request_id is unique over the life of the server."""

    seq: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    sample_idx: int = 0


class Wake(_Message, frozen=True):
    """Another rank was given request `seq`; take part in the steps."""

    seq: int


class Abort(_Message, frozen=True):
    """Forget this request and free its pages; no output follows. Unknown ids (already finished) are fine."""

    request_id: str


class Migrate(_Message, frozen=True):
    """Move experts, as all ranks are told to."""

    seq: int
    job: MigrationJob


class Cancel(_Message, frozen=True):
    """Roll this job back, if it is under way."""

    job_id: int


class Sample(_Message, frozen=True):
    """Answer with Sampled."""


class Stop(_Message, frozen=True):
    """Leave, all together, once idle. The last message."""

    seq: int


class Hello(_Message, frozen=True):
    """The first message of a connection. token: the secret of this run, so that no stranger's bytes are taken."""

    token: str
    rank: int
    pid: int
    host: str


class Ready(_Message, frozen=True):
    """The model is loaded."""

    info: EngineInfo


class Step(_Message, frozen=True):
    """What one step produced. stats, waits: now and then, and always when the rank has become idle."""

    outputs: list[TokenOutput]
    stats: EngineStats | None = None
    waits: WaitTotals | None = None


class Sampled(_Message, frozen=True):
    """This rank's routing sample: [L, A, K] of integers of item_bytes, the experts that tokens chose, -1: masked.
    steps: int64 [A], when."""

    shape: tuple[int, int, int]
    item_bytes: int
    topk_idx: bytes
    steps: bytes


class Drain(_Message, frozen=True):
    """This rank was told, or has reason, to finish what runs and then leave. reason: a signal's name, or words."""

    reason: str


class Fault(_Message, frozen=True):
    """Something is wrong that does not stop the rank: a page that nobody owns. For the log and the metrics."""

    message: str


class Fatal(_Message, frozen=True):
    """This rank cannot go on; it exits right after this message. lost_rank: the rank it holds responsible, if any."""

    message: str
    lost_rank: int | None = None


class Bye(_Message, frozen=True):
    """This rank left its loop together with the others, as Stop asked."""


ToRank = Add | Wake | Abort | Migrate | Cancel | Sample | Stop
ToFrontend = Hello | Ready | Step | Sampled | Drain | Fault | Fatal | Bye

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def pack(message: ToRank | ToFrontend) -> bytes:
    """One frame: a little-endian uint32 length, then msgpack."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Bytes in, whole messages out. `kind` is the union expected on this end."""

    def __init__(self, kind):
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list:
        buffer = self._buffer
        buffer += data
        messages, begin = [], 0
        with memoryview(buffer) as view:
            while len(buffer) - begin >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, begin)
                end = begin + _LENGTH.size + length
                if len(buffer) < end:
                    break
                messages.append(self._decoder.decode(view[begin + _LENGTH.size : end]))
                begin = end
        del buffer[:begin]
        return messages
