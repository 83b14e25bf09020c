"""RemoteServer: its documents, and how it tells a server that is away from one that refuses."""

import io
import socket
import threading

import numpy as np
import pytest
from eprt.balancer import Placement
from eprt.balancer.controller import NoLoadError
from eprt.balancer.remote import RemoteServer, ServerAnswerError, ServerRefusedError, ServerUnreachableError

from tests.unit.balancer.played_server import FIRST, RATE_E


def test_what_a_server_tells_is_read(played):
    server = RemoteServer(f"{played.url}/v1/")
    assert server.url == played.url
    snapshot = server.load_snapshot()
    np.testing.assert_array_equal(snapshot.tokens_PLE[1, 0], 5 * RATE_E)
    np.testing.assert_array_equal(server.placement().physical_to_logical_map, FIRST.physical_to_logical_map)
    assert server.rebalancing()["state"] == "idle"
    played.speeds = [1.0, 0.5]
    assert server.rank_speeds().tolist() == [1.0, 0.5]
    trace, step_LT = server.routing_sample()
    assert trace.topk_idx[0].tolist() == [[0, 1], [1, 2], [0, 4], [3, -1]]
    assert trace.source_gpu[0].tolist() == [0, 1, 0, 1] and step_LT.tolist() == [[1, 2, 3, 4]]


def test_a_placement_is_posted_with_the_speeds_it_was_planned_for(played):
    server, target = RemoteServer(played.url), Placement(np.array([[0, 2, -1, 3, 4, 1]]), num_gpus=2)
    assert server.post_placement(target)["migration"]["job_id"] == 1 and played.posted_speeds is None
    server.post_placement(target, np.array([1.0, 0.5]))
    assert played.posted_speeds == [1.0, 0.5]
    np.testing.assert_array_equal(played.posted[1].physical_to_logical_map, target.physical_to_logical_map)


def test_the_key_is_sent(played):
    played.key = "secret"
    assert RemoteServer(played.url, "secret").rebalancing()["server_id"] == "one"
    with pytest.raises(
        ServerRefusedError, match="401: wrong or missing API key; --api-key gives the server's key"
    ) as e:
        RemoteServer(played.url, "wrong").rebalancing()
    assert e.value.status == 401


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_server_that_is_not_ready_may_be_asked_again(played, status):
    played.failure = (status, "the model is loading")
    with pytest.raises(ServerUnreachableError, match=f"/v1/eprt/load answers {status}: the model is loading"):
        RemoteServer(played.url).load_snapshot()


def test_a_server_that_refuses_is_quoted(played):
    played.failure = (409, "this model has no MoE layers")
    with pytest.raises(ServerRefusedError, match="/v1/eprt/placement answers 409: this model has no MoE layers"):
        RemoteServer(played.url).placement()


@pytest.mark.parametrize("raw", [b"<html>", b"[1]", b"\xff", b"[" * 100_000], ids=["html", "list", "bytes", "deep"])
def test_what_is_not_an_object_is_no_answer_of_a_server(played, raw):
    played.raw = raw
    with pytest.raises(ServerAnswerError, match="/v1/eprt/load does not answer as an eprt server"):
        RemoteServer(played.url).load_snapshot()


def test_a_server_of_another_version_is_refused(played):
    played.schema, played.speeds = "eprt.rebalance/9", []
    with pytest.raises(ServerAnswerError, match="does not answer as an eprt server of this version"):
        RemoteServer(played.url).rebalancing()
    with pytest.raises(ServerAnswerError, match="no rank_speeds"):
        RemoteServer(played.url).rank_speeds()


ROW = {"per_expert": [1, 2], "per_expert_prefill": [0, 0]}
OTHER_FORMS = [
    ("load", {"server_id": {}}, "server_id = {}, which is no str"),
    ("load", {"layers": 5}, "layers = 5, which is no list"),
    ("load", {"layers": [1]}, "layer 0 of the server's load has no list 'per_expert'"),
    ("load", {"layers": [ROW, {**ROW, "per_expert": [1]}]}, "layer 1 .* another number of experts"),
    ("load", {"layers": [{**ROW, "per_expert_prefill": [0]}]}, r"\(1, 2\) experts in all, \(1, 1\) in prefill"),
    (
        "load",
        {"layers": [{**ROW, "per_expert": [1, None]}]},
        "'per_expert' of the server's load does not hold integers",
    ),
    ("load", {"layers": [{**ROW, "per_expert": [1, 10**400]}]}, "does not hold integers"),
    ("load", {"layers": [{**ROW, "per_expert": [[1], [2]]}]}, "does not hold integers"),
    ("load", {"num_steps": float("nan")}, "num_steps = nan, which is no number"),
    ("load", {"expert_us": True}, "expert_us = True"),
    ("rebalance", {"mode": []}, r"mode = \[\], which is no str"),
    ("rebalance", {"state": 1}, "state = 1"),
    ("rebalance", {"migration": 7}, "migration = 7"),
    ("rebalance", {"migration": {"job_id": 1}}, "the migration has no 'state'"),
    ("placement", {"num_gpus": "2"}, "num_gpus='2': must be an integer"),
    ("placement", {"physical_to_logical_map": {}}, "shape"),
    ("placement", {"physical_to_logical_map": [[0, 10**15]]}, "expert 1000000000000000.* 2 slots"),
    ("diagnose", {"rank_speeds": {}}, "no rank_speeds"),
    ("diagnose", {"rank_speeds": [1.0, "x"]}, "rank_speeds has 1 = 'x'"),
]


@pytest.mark.parametrize(("document", "other", "message"), OTHER_FORMS)
def test_every_field_is_checked_by_type(played, document, other, message):
    played.other[document] = other
    server = RemoteServer(played.url)
    ask = {"load": server.load_snapshot, "rebalance": server.rebalancing, "diagnose": server.rank_speeds}
    with pytest.raises(ServerAnswerError, match=f"/v1/eprt/{document}: .*{message}"):
        ask.get(document, server.placement)()


def test_moves_and_a_posted_placements_migration_are_checked(played):
    server = RemoteServer(played.url)
    server.post_placement(FIRST)
    played.migration["moves"] = {"local": "one"}
    with pytest.raises(ServerAnswerError, match="its moves has local = 'one', which is no int"):
        server.rebalancing()
    played.other["rebalance"] = {"migration": None}
    with pytest.raises(ServerAnswerError, match="has no migration"):
        server.post_placement(FIRST)


def test_a_server_without_load_is_told_apart(played):
    played.other["load"] = {"layers": []}
    with pytest.raises(NoLoadError, match="counted no load yet"):
        RemoteServer(played.url).load_snapshot()


def npz(**arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a file of topk_idx"),
        (b"PK\x03\x04", "not a file of topk_idx"),
        (b"\x93NUMPY\x01\x00", "not a file of topk_idx"),
        (npz(topk_idx=np.zeros((1, 2, 2), int)), "not a file of .*source_gpu"),
        (npz(topk_idx=np.zeros((1, 2, 2), object), source_gpu=0, topk_step=0), "allow_pickle"),
        (npz(topk_idx=0, source_gpu=0, topk_step=0), r"topk_idx has shape \(\)"),
        (npz(topk_idx=np.zeros((1, 2, 2), int), source_gpu=np.zeros((1, 2)), topk_step=0), "source_gpu has shape"),
        (
            npz(topk_idx=np.zeros((1, 2, 2), int), source_gpu=np.zeros((1, 2), int), topk_step=np.zeros((1, 1), int)),
            r"topk_step has shape \(1, 1\)",
        ),
    ],
)
def test_a_sample_of_another_form_is_told(played, raw, message):
    played.raw = raw
    with pytest.raises(ServerAnswerError, match=message):
        RemoteServer(played.url).routing_sample()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"", "no answer: .*is a server running there?"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no answer: |it broke off: "),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "it broke off: IncompleteRead"),
    ],
    ids=["closed", "not HTTP", "cut off"],
)
def test_a_server_that_goes_away_while_it_answers_is_unreachable(reply, message):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ServerUnreachableError, match=message):
            RemoteServer(f"http://127.0.0.1:{listener.getsockname()[1]}").rebalancing()


def test_a_url_must_name_its_protocol():
    with pytest.raises(ValueError, match="--url localhost:8000: must begin with http:// or https://"):
        RemoteServer("localhost:8000")
