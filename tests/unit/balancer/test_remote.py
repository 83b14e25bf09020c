"""RemoteServer: its documents, and how it tells a server that is away from one that refuses."""

import socket
import threading

import numpy as np
import pytest
from eprt.balancer import Placement
from eprt.balancer.remote import RemoteServer, ServerRefusedError, ServerUnreachableError

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


@pytest.mark.parametrize("raw", [b"<html>", b"[1]", b"\xff"])
def test_what_is_not_an_object_is_no_answer_of_a_server(played, raw):
    played.raw = raw
    with pytest.raises(ServerRefusedError, match="/v1/eprt/load does not answer as an eprt server"):
        RemoteServer(played.url).load_snapshot()


def test_a_server_of_another_version_is_refused(played):
    played.schema, played.speeds = "eprt.rebalance/9", []
    with pytest.raises(ServerRefusedError, match="does not answer as an eprt server of this version"):
        RemoteServer(played.url).rebalancing()
    with pytest.raises(ServerRefusedError, match="no rank_speeds"):
        RemoteServer(played.url).rank_speeds()


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
