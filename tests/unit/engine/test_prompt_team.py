"""PromptTeam on GPUs, as its hosts see it: two ranks of one process, whose meetings on the GPU are recorded."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from eprt.engine import prompt_team
from eprt.engine.batch_rows import BatchRows
from eprt.engine.prompt_split import ChunkOffer, ChunkPiece
from eprt.engine.prompt_team import PromptTeam
from eprt.engine.request import Request
from eprt.engine.sampling_params import SamplingParams
from eprt.engine.schedule import Chunk, Schedule
from eprt.engine.team_pages import TeamPages
from eprt.ep.errors import RankLostError
from eprt.ep.group.view import View
from eprt.ep.group.window import SharedWindow
from eprt.ep.nvlink.meeting import DeviceMeeting
from tests.gather_group import GatherGroup
from tests.unit.engine.cases import EOS
from tests.unit.engine.recall_model import VOCAB

CHUNK, PAGE, SHIFT = 64, 4, 1000
GPU = torch.device("cuda")


class OneOfTwo(GatherGroup):
    def __init__(self, rank: int, memory: list[np.ndarray]):
        self.rank, self.size, self.node_of_rank, self.view = rank, 2, (0, 0), View.full(2)
        self._memory = memory

    def shared_window(self, num_bytes: int) -> SharedWindow:
        if not self._memory:
            self._memory += [np.zeros(num_bytes, dtype=np.uint8) for _ in range(2)]
        return SharedWindow(list(self._memory))

    def allgather(self, value: Any) -> list[Any]:
        return [value] * 2

    def barrier(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def teams(monkeypatch):
    monkeypatch.setattr(prompt_team, "DeviceMeeting", lambda group, ranks: Mock(spec=DeviceMeeting))
    memory: list[np.ndarray] = []
    made = []
    for rank in range(2):
        rows = BatchRows(2, 256, PAGE, VOCAB)
        pages = TeamPages([], 0, [0, SHIFT] if rank == 0 else [SHIFT, 0], Mock())
        made.append(PromptTeam(OneOfTwo(rank, memory), 2, rows, CHUNK, pages, GPU))
    return made


def offered(team: PromptTeam, tokens: list[int], pages: list[int]) -> tuple[Schedule, ChunkOffer]:
    """A step of one chunk, all of a prompt."""
    rows = team._rows
    params = SamplingParams(max_tokens=4)
    how: Any = {"sample_idx": 0, "seed": 0, "max_model_len": 256, "eos_token_ids": (EOS,)}
    request = Request.new("a", tokens, params, **how)
    request.pages = pages
    rows.assign_row(request)
    chunk = Chunk(request, request.row, 0, len(tokens), True, True)
    none = np.zeros(0, dtype=np.int64)
    schedule = Schedule([], [chunk], [request], ["a"], none, none, none, len(tokens))
    offer = team.offer(schedule)
    rows.release_row(request)
    return schedule, offer


def empty(team: PromptTeam) -> Schedule:
    none = np.zeros(0, dtype=np.int64)
    schedule = Schedule([], [], [], [], none, none, none, 0)
    assert team.offer(schedule) == ChunkOffer()
    return schedule


def pieces_of(tokens: list[int]) -> list[ChunkPiece]:
    half = len(tokens) // 2
    return [ChunkPiece(0, 0, 0, half - 8), ChunkPiece(0, 1, half - 8, half + 8), ChunkPiece(0, 0, half + 8, 2 * half)]


def test_a_guest_has_the_owners_pages_by_its_own_numbers_and_the_owner_may_be_a_step_ahead(teams):
    owner, helper = teams
    steps = [(list(range(2 + i, 66 + i)), list(range(i * 16, 16 + i * 16))) for i in range(4)]
    schedule, offer = offered(owner, *steps[0])
    waiting = empty(helper)
    for (tokens, pages), following in zip(steps, [*steps[1:], ([2] * 64, [3] * 16)]):
        owner.share(schedule, pieces_of(tokens), (offer, ChunkOffer()))
        schedule, next_offer = offered(owner, *following)  # shown before the helper has read what this step's is
        (guest,) = helper.share(waiting, pieces_of(tokens), (offer, ChunkOffer())).guests
        assert guest.start == 24 and guest.num_tokens == 16
        assert guest.tokens.tolist() == tokens[24:41]
        assert guest.pages.tolist() == [page + SHIFT for page in pages[:10]]
        offer, waiting = next_offer, empty(helper)


def test_the_team_meets_once_more_behind_a_step_that_was_split_and_not_behind_others(teams):
    owner, helper = teams
    tokens = list(range(2, 66))
    schedule, offer = offered(owner, tokens, list(range(16)))
    waiting = empty(helper)
    both = [(owner, schedule), (helper, waiting)]
    for team, its in both:
        assert team.share(its, pieces_of(tokens), (offer, ChunkOffer())).guests is not None
        assert team.on_gpu.wait.call_count == 0
    for num_steps in range(2):
        for team, _ in both:
            its = empty(team)
            assert team.share(its, [], (ChunkOffer(),) * 2) is its
            assert team.on_gpu.wait.call_count == 1, num_steps


def test_a_team_is_halted_and_begins_again_with_its_pages(teams):
    owner, _ = teams
    error = RankLostError(0, 2, 1, "a step")
    owner.halt(error, 3)
    owner.check()
    owner.on_gpu.halt.assert_called_once_with(error, 3)
    owner.on_gpu.check.assert_called_once_with()
    owner._is_split, owner._turn = True, 1
    owner._group.view = View(1, (True, False))
    owner.restart(17)
    owner.on_gpu.restart.assert_called_once_with(17)
    owner._pages.memory.remap.assert_called_once_with((True, False))
    owner.share(empty(owner), [], (ChunkOffer(),) * 2)
    assert owner.on_gpu.wait.call_count == 0  # nothing of the view before is under way
    assert owner.current_wait() is owner.on_gpu.current_wait.return_value
