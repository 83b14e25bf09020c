"""Messages between the HTTP frontend and the ranks: msgpack, one tagged struct per message.

`seq` counts the frontend's AddRequests, Migrates, Suspends between two steps and its Stop. The rank that is given a
request gets AddRequest(seq), every other rank Wake(seq): each rank knows from its own connection alone which seq it has
seen. The ranks may only fall asleep, or leave, when all of them have seen the same seq (the engine's step agrees on
it), so no rank sleeps through a wake-up.

Where ranks may be lost (--max-lost-ranks), the frontend takes the ranks from one view to the next (roster.py):
Suspend to each that takes part in the next view, Suspended from all, Resume to each, Resumed from all, Go to each. A
later Suspend, with a larger number, makes an earlier one void.

Between instances (--prefill, --decode) a request that was added with hands_over goes on elsewhere: Held from the rank
that has its pages, Adopt to a rank of another instance, Arrived from there; then StartAdopted(seq) to that rank, a Wake
to its peers, and AbortRequest to the first rank, which lets the pages go. The number comes after the pages, because a
rank with a number that it has not seen does not sleep. Knows nothing of sockets (channel.py).
"""

import hmac
import struct

import msgspec

from eprt.engine.outputs import EngineStats, TokenOutput
from eprt.engine.sampling_params import SamplingParams
from eprt.ep.migration.job import MigrationJob
from eprt.kv.reader import HeldPages
from eprt.serve.options import InstanceName


class HandoffTerms(msgspec.Struct, frozen=True):
    """What must be equal in instances that hand each other requests. Names are those that a refusal tells."""

    model: str  # fingerprint of the checkpoint
    page_size: int
    cache_format: str  # of the KV cache
    drafts: int  # --num-speculative-tokens
    version: str  # of eprt


class EngineInfo(msgspec.Struct, frozen=True):
    """What the frontend must know of one rank's loaded model. All but expert_of_slot and gpu is equal on all ranks."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and completion together
    kv_tokens: int  # tokens for which this rank's KV cache has room
    node_of_rank: tuple[int, ...]  # node index of each rank
    num_experts: int  # logical ones, 0 without MoE layers
    moe_layers: tuple[int, ...]  # model layer index of each row of EngineStats.slot_tokens; a loaded MTP layer's last
    expert_of_slot: list[list[int]]  # per MoE layer: the logical expert in each slot of this rank at first, -1: none
    spare_experts: int = 0  # experts that may be on their way to this rank at once, 0 where experts cannot move
    expert_bytes: int = 0  # of one expert's weights and scales, in the layer where it has most
    gpu: str | None = None  # that this rank computes on; None: CPUs
    terms: HandoffTerms | None = None  # None: its requests stay in this instance
    page_owner: str = ""  # PageSource.owner of this rank's pages


class SlotTotals(msgspec.Struct, frozen=True, array_like=True):
    """What a rank's expert slots have received since the start, whichever expert each one held."""

    epoch: int  # of the placement that serves now
    expert_of_slot: list[list[int]]  # per MoE layer: the logical expert that each slot holds now, -1: none
    rows: list[list[int]]  # per MoE layer: tokens that each slot was given


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
    usage: dict[str, float] | None = None  # some of eprt.diagnostics' USAGE


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class AddRequest(_Message, frozen=True):
    """Run this request."""

    seq: int
    request_id: str  # unique over the life of the server
    prompt_token_ids: list[int]
    params: SamplingParams
    sample_idx: int = 0
    generated: list[int] = []  # by a rank that is gone: the request goes on behind them
    hands_over: bool = False  # after one more token it goes on in another instance; answer with Held


class Adopt(_Message, frozen=True):
    """Pull these pages, and answer with Arrived; the request runs once StartAdopted names it."""

    request: AddRequest  # its number says nothing here; its last generated token is the first that the pages lack
    held: HeldPages


class StartAdopted(_Message, frozen=True):
    """Run a request that has arrived. Ids of requests that have ended are fine."""

    seq: int
    request_id: str


class ForgetSource(_Message, frozen=True):
    """Pages of this owner are read no more: its process is gone."""

    owner: str


class Wake(_Message, frozen=True):
    """Another rank was given request `seq`: take part in the steps."""

    seq: int


class AbortRequest(_Message, frozen=True):
    """Forget this request and free its pages; no output follows. Unknown ids (requests that have ended) are fine."""

    request_id: str


class Migrate(_Message, frozen=True):
    """Move experts; all ranks are told the same."""

    seq: int
    job: MigrationJob


class CancelMigration(_Message, frozen=True):
    """Roll this job back, if it is under way."""

    job_id: int


class AskRouting(_Message, frozen=True):
    """Answer with RoutingReply."""


class Ping(_Message, frozen=True):
    """Say Pong as soon as no step is under way."""


class Stop(_Message, frozen=True):
    """Leave, all together, once idle. The last message."""

    seq: int


class Admit(_Message, frozen=True):
    """To a rank that joins: the slot is its own, load the model. Until a Suspend names it, it takes part in nothing."""


class Refused(_Message, frozen=True):
    """To a rank that joins: it cannot. The frontend closes the connection."""

    message: str


class Suspend(_Message, frozen=True):
    """Take no more steps, and wait for Resume. A rank that takes no part any more leaves instead."""

    view: int  # number of the view to come; larger than any before
    alive: list[bool]  # who takes part in it
    # Nobody is lost: suspend after the step in which all ranks have seen this number. None: break the step off.
    after_seq: int | None = None


class Resume(_Message, frozen=True):
    """Enter the view that the latest Suspend named: all its ranks have suspended."""

    view: int
    rows: list[list[int]]  # per MoE layer: the logical expert of every slot of all ranks, -1: none
    epoch: int  # at which all exchanges go on; larger than any that a rank has used
    placement_epoch: int  # of the placement that rows are
    pids: list[int]  # of all ranks: whom to watch from now on
    lacks_experts: bool = False  # rows has no slot for some experts: LoadExperts follows


class LoadExperts(_Message, frozen=True):
    """Some experts have no slot in the view that has been entered. Read those that come here, between steps or beside
    them, and say ExpertsLoaded; Suspended then tells of them."""

    view: int
    rows: list[list[int]]  # as Resume has them, with every expert


class Go(_Message, frozen=True):
    """All ranks have entered the view: take steps."""

    view: int
    seq: int  # the latest number: every rank has seen it with this message


class Hello(_Message, frozen=True):
    """The first message of a connection."""

    token: str  # the run's secret: no other process's bytes are read as messages
    rank: int
    pid: int
    host: str
    instance: InstanceName | None = None  # that the rank is part of; None: the server is one

    def has_token(self, token: str) -> bool:
        """Takes as long for a wrong token as for the right one."""
        return hmac.compare_digest(self.token.encode(), token.encode())


class Loading(_Message, frozen=True):
    """How far this rank has read its part of the checkpoint, now and then."""

    num_bytes: int
    num_total: int


class Ready(_Message, frozen=True):
    """The model is loaded."""

    info: EngineInfo


class StepReport(_Message, frozen=True):
    """What one step produced."""

    outputs: list[TokenOutput]
    # Now and then, and always when the rank has become idle.
    stats: EngineStats | None = None
    waits: WaitTotals | None = None


class Heartbeat(_Message, frozen=True):
    """What this rank is at, twice a second, from a thread: it comes also while a step waits or computes for long."""

    asleep: bool  # it waits for requests, or for the frontend: it is in no step
    cpu_s: float  # processor time that its process has used
    waits_for: int | None = None  # the rank that it waits for; None: none, or only since some milliseconds
    call: str = ""  # in which call
    waited_s: float = 0.0


class Held(_Message, frozen=True):
    """A request has the token that was asked for, and goes on elsewhere; its pages stay until AbortRequest."""

    request_id: str
    held: HeldPages


class Arrived(_Message, frozen=True):
    """The pages of an adopted request are here, or cannot be: then the request is forgotten here."""

    request_id: str
    num_pulled: int = 0  # pages that were copied; the others were here, or there was no room for a bookmark
    error: str = ""


class RoutingReply(_Message, frozen=True):
    """This rank's routing sample: the experts that A of its tokens chose."""

    shape: tuple[int, int, int]  # L MoE layers, A tokens, K choices
    item_bytes: int  # of an integer of topk_idx
    topk_idx: bytes  # [L, A, K], -1: masked
    steps: bytes  # int64 [A], the step of each token


class Pong(_Message, frozen=True):
    """The answer to a Ping."""


class Drain(_Message, frozen=True):
    """This rank was told, or has reason, to finish what runs and then leave."""

    reason: str  # a signal's name, or words


class BrokenInvariant(_Message, frozen=True):
    """Something is wrong that does not stop the rank, as a page without an owner. For the log and the metrics."""

    message: str


class Fatal(_Message, frozen=True):
    """This rank cannot go on; it exits right after this message."""

    message: str
    lost_rank: int | None = None  # the rank that is the cause, if it is another one
    hung: bool = False  # that one did not come before the deadline of a wait; else its process has ended


class Lost(_Message, frozen=True):
    """This rank waited for another in vain, and now waits for a Suspend."""

    rank: int  # the other one
    hung: bool  # it did not come before the deadline of the wait; else its process has ended
    message: str


class Suspended(_Message, frozen=True):
    """The step in flight is broken off."""

    view: int  # of the Suspend
    expert_of_slot: list[list[int]]  # per MoE layer: the logical expert that each slot of this rank holds, -1: none
    epoch: int  # largest of any of its exchanges
    placement_epoch: int  # of the placement that serves here


class Resumed(_Message, frozen=True):
    """This rank is in the view, with all experts that Resume gave it."""

    view: int


class ExpertsLoaded(_Message, frozen=True):
    """This rank has read what LoadExperts gave it."""

    view: int  # of the LoadExperts


class Bye(_Message, frozen=True):
    """This rank left its loop: together with the others, as Stop asked, or alone, as a Suspend without it asked."""


ToRank = (
    AddRequest
    | Adopt
    | StartAdopted
    | ForgetSource
    | Wake
    | AbortRequest
    | Migrate
    | CancelMigration
    | AskRouting
    | Ping
    | Stop
    | Admit
    | Refused
    | Suspend
    | Resume
    | LoadExperts
    | Go
)
ToFrontend = (
    Hello
    | Loading
    | Ready
    | StepReport
    | Heartbeat
    | Held
    | Arrived
    | RoutingReply
    | Pong
    | Drain
    | BrokenInvariant
    | Fatal
    | Lost
    | Suspended
    | Resumed
    | ExpertsLoaded
    | Bye
)

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def pack(message: msgspec.Struct) -> bytes:
    """One frame: a little-endian uint32 length, then msgpack."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Bytes in, whole messages out. `kind` is the union of messages expected on this end."""

    def __init__(self, kind):
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def add_bytes(self, data: bytes) -> list:
        """The messages that these bytes complete. ValueError for bytes that are not a message."""
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
