"""Messages: every one comes out as it went in, wherever the bytes are cut; bytes that are no message are refused."""

import random

import msgspec
import pytest

from eprt.engine.outputs import EngineStats, TokenOutput
from eprt.engine.sampling_params import SamplingParams
from eprt.ep.migration.job import MigrationJob
from eprt.kv.reader import CachePart, HeldPages, PageSource
from eprt.serve.options import InstanceName
from eprt.serve.ranks import messages
from eprt.serve.ranks.messages import ToFrontend, ToRank, Unpacker, WaitTotals, pack

INFO = messages.EngineInfo(
    vocab_size=9,
    max_model_len=8,
    kv_tokens=64,
    node_of_rank=(0, 0),
    num_experts=4,
    moe_layers=(1,),
    expert_of_slot=[[0, 1]],
    terms=messages.HandoffTerms("sha", 16, "bf16", 2, "1.0"),
    page_owner="me",
)
STATS = EngineStats(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0.5, expert_tokens=b"ab", slot_tokens=[7])
HELD = HeldPages(PageSource("memory", "me", 7, (CachePart(5, (2, 9, 64)),)), [3, 8], [17, -4])
TO_RANK = [
    messages.AddRequest(1, "1", [1, 2], SamplingParams(stop=("x",), logit_bias={3: 1.0}), 1),
    messages.Adopt(messages.AddRequest(0, "1", [1, 2], SamplingParams(), generated=[4], hands_over=True), HELD),
    messages.StartAdopted(2, "1"),
    messages.ForgetSource("me"),
    messages.Wake(2),
    messages.AbortRequest("1"),
    messages.Migrate(3, MigrationJob(1, 0, (), {}, (), timeout_s=1.0)),
    messages.CancelMigration(1),
    messages.AskRouting(),
    messages.Ping(),
    messages.Stop(4),
    messages.Admit(),
    messages.Refused("the slot is taken"),
    messages.Suspend(1, [True, False], 5),
    messages.Resume(1, [[0, 1, -1, -1]], 7, 2, [10, 11]),
    messages.LoadExperts(1, [[0, 1, 2, 3]]),
    messages.Go(1, 6),
]
TO_FRONTEND = [
    messages.Hello("secret", 1, 4711, "host"),
    messages.Hello("secret", 1, 4711, "host", InstanceName("decode-0", "decode", "ab", 2)),
    messages.Held("1", HELD),
    messages.Arrived("1", 2, "damaged"),
    messages.Loading(3 * 10**9, 16 * 10**9),
    messages.Ready(INFO),
    messages.StepReport([TokenOutput("1", 5, -0.5, ((5, -0.5),), "stop", ((-1.0, (), 4),), 2)], STATS),
    messages.StepReport(
        [], STATS, WaitTotals(1, [0.0], [0.0], [1], [1], 2.0, messages.SlotTotals(0, [[0]], [[5]]), 0.5, {"steps": 3})
    ),
    messages.Heartbeat(False, 3.5, 1, "dispatch", 0.4),
    messages.RoutingReply((1, 2, 1), 1, b"ab", b"12345678"),
    messages.Pong(),
    messages.Drain("SIGTERM"),
    messages.BrokenInvariant("a page"),
    messages.Fatal("a NaN", 1, True),
    messages.Lost(1, True, "waited 30 s"),
    messages.Suspended(1, [[0, 1]], 6, 1),
    messages.Resumed(1),
    messages.ExpertsLoaded(1),
    messages.Bye(),
]


def test_every_message_is_tried():
    assert {type(message) for message in TO_RANK} == set(ToRank.__args__)
    assert {type(message) for message in TO_FRONTEND} == set(ToFrontend.__args__)


@pytest.mark.parametrize(
    "kind, sent", [(ToRank, TO_RANK), (ToFrontend, TO_FRONTEND)], ids=["to a rank", "to the frontend"]
)
def test_messages_come_out_whole_however_the_bytes_are_cut(kind, sent):
    draw, data = random.Random(0), b"".join(map(pack, sent))
    for _ in range(30):
        cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(12)))
        unpacker, received = Unpacker(kind), []
        for begin, end in zip([0, *cuts], [*cuts, len(data)]):
            received += unpacker.add_bytes(data[begin:end])
        assert list(map(msgspec.to_builtins, received)) == list(map(msgspec.to_builtins, sent))


def test_a_message_of_the_other_direction_is_refused():
    with pytest.raises(ValueError, match="Invalid value"):
        Unpacker(ToRank).add_bytes(pack(messages.Bye()))


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(ValueError):
        Unpacker(ToFrontend).add_bytes(b"\x03\x00\x00\x00abc")
