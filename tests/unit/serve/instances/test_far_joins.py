"""Who of another host may join, and what it is told."""

import asyncio
import contextlib

import msgspec
import pytest

import eprt
from eprt.serve.errors import ApiError
from eprt.serve.fingerprint import fingerprint
from eprt.serve.flags import parse_options
from eprt.serve.instances.far_joins import FarJoinAnswer, FarJoinRequest, FarJoins
from eprt.serve.options import FrontendConfig, OptionError
from tests.unit.cases import MODEL


def make_joins(address: str = "127.0.0.1:0", *flags: str) -> FarJoins:
    given = ["--model", str(MODEL), "--prefill", "1", "--decode", "1", "--join-address", address, *flags]
    return FarJoins(FrontendConfig(parse_options(given), 2, "token", -1, -1))


def asked(**other) -> FarJoinRequest:
    return msgspec.structs.replace(FarJoinRequest("prefill", 2, eprt.__version__, "Node_7.cluster"), **other)


def test_it_is_told_its_name_and_where_to_connect_and_no_secret_of_clients():
    joins = make_joins("0.0.0.0:0", "--api-key", "of-clients", "--admin-key", "of-admins", "--max-queue", "5")
    with contextlib.closing(joins.sock):
        answer = asyncio.run(joins.invite(asked(), ()))
        assert (answer.host, answer.port, answer.model) == ("", joins.port, fingerprint(str(MODEL)))
        config = answer.config
        assert config.instance is not None and config.instance.name == "prefill-node-7-0"
        assert (config.num_ranks, config.num_host_ranks, config.token) == (2, 2, "token")
        assert config.options.engine.max_queue == 2 * (5 + config.options.engine.max_num_seqs), "of all ranks"
        told = msgspec.json.encode(answer)
        assert b"of-clients" not in told and b"of-admins" not in told
        assert msgspec.json.decode(told, type=FarJoinAnswer) == answer
        again = asyncio.run(joins.invite(asked(), ("prefill-node-7-1",))).config.instance
        assert again is not None and again.name == "prefill-node-7-2"
        assert again.incarnation != config.instance.incarnation


def test_a_given_address_is_told():
    joins = make_joins()
    with contextlib.closing(joins.sock):
        assert asyncio.run(joins.invite(asked(host="\u00fc"), ())).host == "127.0.0.1"


@pytest.mark.parametrize(
    "other, words",
    [
        ({"version": "0.0"}, f"the server runs eprt {eprt.__version__}, this is eprt 0.0"),
        ({"model": "abc"}, f"another model than the server's .{MODEL}."),
    ],
)
def test_who_does_not_fit_is_refused_by_name(other, words):
    joins = make_joins()
    with contextlib.closing(joins.sock), pytest.raises(ApiError, match=words) as caught:
        asyncio.run(joins.invite(asked(**other), ()))
    assert caught.value.status == 409


def test_ranks_that_make_no_teams_are_refused():
    joins = make_joins("127.0.0.1:0", "--prefill-ranks", "2", "--decode-ranks", "2", "--attention-tp", "2")
    with contextlib.closing(joins.sock), pytest.raises(ApiError, match="--attention-tp 2: 3 ranks make no teams of 2"):
        asyncio.run(joins.invite(asked(ranks=3), ()))


def test_an_address_that_cannot_be_had_is_named():
    with pytest.raises(OptionError, match=r"--join-address 192\.0\.2\.1:0: cannot listen there: "):
        make_joins("192.0.2.1:0")
