"""TorchGroup where a rank does not come: what gloo says is told with the rank, the deadline and the remedy."""

import pytest
import torch.distributed as dist

from eprt.ep.group.torch_group import TorchGroup


@pytest.fixture
def alone(monkeypatch):
    """A process group of one."""
    monkeypatch.setenv("EPRT_TIMEOUT_S", "2.5")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def nobody_comes(*args, **kwargs):
    raise RuntimeError("Timed out waiting 2500ms for send operation\nframe #1: ...")


WORDS = r"^\[rank 0/1\] .*within EPRT_TIMEOUT_S=2.5 s.*raise EPRT_TIMEOUT_S. gloo: Timed out .* send operation$"


@pytest.mark.parametrize("call", ["all_gather_object", "barrier"])
def test_a_rank_that_does_not_come_to_a_collective_call(alone, monkeypatch, call):
    group = TorchGroup()
    assert group.allgather("here") == ["here"]
    monkeypatch.setattr(dist, call, nobody_comes)
    with pytest.raises(RuntimeError, match=WORDS):
        group.barrier() if call == "barrier" else group.allgather(0)
    monkeypatch.undo()
    group.close()


def test_a_rank_that_does_not_come_to_the_construction(alone, monkeypatch):
    monkeypatch.setattr(dist, "new_group", nobody_comes)
    with pytest.raises(RuntimeError, match=WORDS):
        TorchGroup()
