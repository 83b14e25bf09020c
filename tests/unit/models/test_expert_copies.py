"""ExpertCopies: experts of other ranks from host memory, byte for byte, also after their ranks are gone."""

import contextlib
import os
import threading
from pathlib import Path

import pytest
import torch

from eprt.config import EngineConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.group.host_board import HostBoard
from eprt.models.expert_copies import ExpertCopies
from eprt.models.loader import load_model
from eprt.models.model import ExpertPlace

DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo_model" / "checkpoint"
NUM_RANKS = 2


def load(board: HostBoard, rank: int, **options):
    group = EPGroup.from_host(HostBoard(os.dup(board.fd), board.size), rank, joins=options.pop("joins", False))
    config = EngineConfig(str(DEMO), expert_host_copies="node", spare_experts=2, **options)
    return load_model(config, group), group


def load_all(board: HostBoard, **options) -> list:
    """The model of each rank, every rank a thread."""
    models: list = [None] * board.size

    def of_rank(rank: int) -> None:
        models[rank], _ = load(board, rank, **options)

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(board.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert all(models)
    return models


def bytes_of(model, row: int, expert: int) -> list[torch.Tensor]:
    """What the rank that holds the expert has in its buffer."""
    layer = model.moe_layers()[row]
    buffer = layer.weight_buffers()[list(layer.expert_of_slot).index(expert)]
    return [part[buffer].clone() for part in layer.pool.parts]


@pytest.fixture
def board():
    with contextlib.closing(HostBoard.create(NUM_RANKS)) as made:
        yield made


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_rank_gets_the_experts_of_another_without_the_checkpoint(board, quantization):
    mine, theirs = load_all(board, quantization=quantization)
    layers, places, expected = mine.moe_layers(), [], []
    for row in range(len(layers)):
        expert = theirs.moe_layers()[row].expert_of_slot[-1]
        assert expert not in layers[row].expert_of_slot
        places.append(ExpertPlace(row, expert, layers[row].pool.take_buffer() if row < 2 else 0))
        expected.append(bytes_of(theirs, row, expert))
        if row == 1:
            break
    mine.expert_source._checkpoint = None  # nobody asks it
    mine.load_experts(places)
    for place, parts in zip(places, expected):
        for part, want in zip(layers[place.row].pool.parts, parts):
            assert torch.equal(part[place.buffer], want)
    for model in (mine, theirs):
        model.close()


def test_a_joiner_finds_the_copies_and_leaves_them_alone(board):
    mine, theirs = load_all(board)
    copies = mine.expert_source._copies
    before = [segment.clone() for segment in copies._segments]
    theirs.expert_source._copies._segments[1][5000] ^= 1  # a trace: who writes anew would cover it
    joiner, _ = load(board, 1, joins=True)
    assert not torch.equal(copies._segments[1], before[1]) and torch.equal(copies._segments[0], before[0])
    joiner.close()


def test_what_has_no_complete_copy_is_left_to_the_checkpoint(board):
    mine, theirs = load_all(board)
    copies = mine.expert_source._copies
    assert isinstance(copies, ExpertCopies)
    layers = mine.moe_layers()
    expert = theirs.moe_layers()[0].expert_of_slot[0]
    place = ExpertPlace(0, expert, layers[0].pool.take_buffer())
    copies._complete[1][0] = 0
    assert copies.load([place], layers) == [place]
    mine.load_experts([place])  # from the files
    for part, want in zip(layers[0].pool.parts, bytes_of(theirs, 0, expert)):
        assert torch.equal(part[place.buffer], want)
    copies._complete[1][0] = 1
    assert copies.load([place], layers) == []


def test_virtual_nodes_have_no_copies_of_each_other():
    class TwoNodes:
        num_nodes, rank, size = 2, 0, 2

    with pytest.raises(ValueError, match=r"\[rank 0/2\] --expert-host-copies node: the ranks are on 2 nodes"):
        ExpertCopies(TwoNodes(), [])  # type: ignore[arg-type]


def test_without_the_flag_there_are_none():
    model = load_model(EngineConfig(str(DEMO)), EPGroup.single())
    assert model.expert_source._copies is None  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="--expert-host-copies rank: must be off or node"):
        EngineConfig(str(DEMO), expert_host_copies="rank")
