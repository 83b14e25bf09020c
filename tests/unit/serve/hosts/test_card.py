"""What a host says of itself, and each reason for which it does not fit."""

import re
from dataclasses import replace

import pytest

import eprt
from eprt.config import EngineConfig
from eprt.serve.hosts.card import greeting, host_card, misfit, other_version
from eprt.serve.options import OptionError, ServeOptions
from tests.unit.cases import MODEL
from tests.unit.serve.hosts.cases import CARD, card


def test_a_host_that_fits():
    assert misfit(CARD, card(), None) is None
    assert misfit(CARD, card(), "tcp:threads=2") is None
    assert misfit(CARD, card(memory="x"), "paced:gbps=25") is None


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"nnodes": 2}, r"host 1 \(b\) has --nnodes 2, host 0 \(a\) has 3; give all hosts the same"),
        ({"node": 0}, r"--node-rank 0 \(b\) is taken by host 0 \(a\); give each host a rank of its own"),
        ({"node": 3}, r"--node-rank 3 \(b\): must be in 0\.\.2, as host 0 \(a\) has --nnodes 3"),
        ({"num_ranks": 4}, r"host 1 \(b\) has -n 4, host 0 \(a\) has -n 2; start equally many ranks on each host"),
        ({"model": "n"}, r"host 1 \(b\) has another model than host 0 \(a\): config.json or the weight files differ"),
        ({"flags": {"--seed": "1", "--api-key": "d1"}}, r"host 1 \(b\) has --seed 1, host 0 \(a\) has 0"),
        ({"flags": {"--api-key": "d1"}}, r"host 1 \(b\) has --seed not set, host 0 \(a\) has 0; give all"),
        ({"flags": {"--seed": "0", "--api-key": "d2"}}, r"host 1 \(b\) has another --api-key than host 0 \(a\); give"),
    ],
)
def test_a_host_that_does_not_fit(changes, reason):
    assert re.match(reason, misfit(CARD, card(**changes), None) or "")


def test_the_paced_wire_is_of_one_machine():
    assert "the paced wire is memory of one host, and host 1 (b) is not host 0 (a); write tcp" in str(
        misfit(CARD, card(), "paced")
    )


def options(**changes) -> ServeOptions:
    return ServeOptions(engine=EngineConfig(model_dir=str(MODEL)), model_name="m", num_ranks=2, nnodes=2, **changes)


def test_a_card_has_what_must_be_equal_and_no_secret(monkeypatch):
    monkeypatch.setenv("EPRT_RANKS_PER_NODE", "2")
    first = host_card(options(api_key="hush", node_rank=0, dist_init_addr="a:1"), "key")
    other = host_card(options(api_key="hush", node_rank=1, dist_init_addr="b:1", dist_timeout_s=5), "key")
    assert misfit(first, other, None) is None
    assert first.flags["EPRT_RANKS_PER_NODE"] == "2" and first.flags["--api-key"]
    assert "hush" not in str(first.flags)
    assert misfit(first, host_card(options(api_key="other", node_rank=1), "key"), None) == (
        f"{other} has another --api-key than {first}; give all hosts the same"
    )


def test_another_version_is_refused_before_its_messages_are_read():
    assert other_version(greeting(CARD)) is None
    told = other_version({**greeting(card()), "version": "9.9"})
    assert (
        told == f"host 1 (b) runs eprt 9.9, host 0 runs eprt {eprt.__version__}; install the same version on all hosts"
    )
    assert other_version({}) is not None


def test_a_checkpoint_that_cannot_be_read(tmp_path):
    with pytest.raises(OptionError, match=rf"--model {tmp_path}: cannot be read: No such file"):
        host_card(replace(options(), engine=EngineConfig(model_dir=str(tmp_path))), "key")
