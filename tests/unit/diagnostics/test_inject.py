"""Faults on purpose: how they are written, whom they hit and when, and that a paused process goes on at the end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from eprt.diagnostics import inject
from eprt.diagnostics.inject import KINDS, Injection, Injector

from tests.serve.processes import wait_until

RANKS, SLOTS, TOP_K = 8, 32, 4


class Recorder:
    """A backend that notes what reaches it."""

    config = SimpleNamespace(num_slots=SLOTS)

    def __init__(self):
        self.slots_TK = torch.zeros(0)
        self.delays: list[tuple[int, float]] = []

    def dispatch_send(self, x_TH, slot_idx_TK, topk_weights_TK):
        self.slots_TK = slot_idx_TK

    def dispatch_recv(self, handle):
        return "received"

    def combine_send(self, y_RH, handle):
        return "sent"

    def delay_link(self, peer: int, seconds: float):
        self.delays.append((peer, seconds))


class At(Injector):
    """An injector whose clock stands at now_s."""

    now_s = 0.0

    def since_start_s(self) -> float:
        return self.now_s


def slots(seed: int = 0, num_tokens: int = 400) -> torch.Tensor:
    return torch.rand(num_tokens, SLOTS, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :TOP_K]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("slow-rank:3:2x", Injection("slow-rank", 3, factor=2.0)),
        ("slow-link:2:5:3ms@10-", Injection("slow-link", 2, peer=5, seconds=0.003, start_s=10.0)),
        ("late-compute:0:1.5x@1.5-4", Injection("late-compute", 0, factor=1.5, start_s=1.5, end_s=4.0)),
        ("late-compute:0:200us", Injection("late-compute", 0, seconds=200 * 1e-6)),
        ("skewed-tokens:3:4x", Injection("skewed-tokens", 3, factor=4.0)),
        ("bursty:3:40ms", Injection("bursty", 3, seconds=0.04)),
        ("stop:3:5s", Injection("stop", 3, seconds=5.0, start_s=5.0)),
    ],
)
def test_how_a_fault_is_written(text, wanted):
    assert Injection.parse(text) == wanted and wanted.kind in KINDS
    assert str(Injection.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast-rank:1:2x", "no fault 'fast-rank'; there are slow-rank"),
        ("slow-rank:1", "write slow-rank:RANK:SIZE"),
        ("slow-rank:one:2x", "write slow-rank:RANK:SIZE"),
        ("slow-rank:-1:2x", "write slow-rank:RANK:SIZE"),
        ("slow-rank:1:2", "write slow-rank:RANK:SIZE"),
        ("slow-rank:1:3ms", "slow-rank takes a factor"),
        ("slow-link:1:2:2x", "slow-link takes a time"),
        ("slow-link:1:3ms", "write slow-link:RANK:PEER:SIZE"),
        ("slow-link:1:1:3ms", "a link has two ends"),
        ("skewed-tokens:1:1x", "a factor must be above 1x"),
        ("stop:1:0s", "a time above 0"),
        ("slow-rank:1:2x@", "FROM-TO"),
        ("slow-rank:1:2x@20-10", "FROM-TO"),
    ],
)
def test_a_fault_written_wrongly_is_refused_with_the_remedy(text, message):
    with pytest.raises(ValueError, match=message) as error:
        Injection.parse(text)
    assert text in str(error.value)


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"names rank 9; there are ranks 0\.\.7"):
        Injector(["slow-link:1:9:3ms"], 0, RANKS)


def test_tokens_of_every_rank_are_skewed_towards_the_one():
    """Four ranks' share of all tokens, each of them once per slot, and none to anybody outside -1 and the slots."""
    received_N = torch.zeros(RANKS)
    for rank in range(RANKS):
        inner = Recorder()
        backend = At(["skewed-tokens:3:4x"], rank, RANKS).wrap(inner)
        backend.dispatch_send(None, slots(rank), None)
        owner_TK = torch.where(inner.slots_TK >= 0, inner.slots_TK // (SLOTS // RANKS), -1)
        for peer in range(RANKS):
            received_N[peer] += (owner_TK == peer).any(1).sum()
        assert inner.slots_TK.max() < SLOTS
        for row in inner.slots_TK.tolist():
            taken = [slot for slot in row if slot >= 0]
            assert len(set(taken)) == len(taken)
    usual = received_N[[0, 1, 2, 4, 5, 6, 7]].mean() / (1 - 3 / 7)  # of the share that is not sent to rank 3
    assert received_N[3] / (RANKS * 400) == pytest.approx(3 / 7 + 4 / 7 * float(usual) / (RANKS * 400), abs=0.03)


def test_masked_entries_stay_masked_under_skew():
    slots_TK = slots()
    slots_TK[::3] = -1
    inner = Recorder()
    At(["skewed-tokens:3:4x"], 0, RANKS).wrap(inner).dispatch_send(None, slots_TK, None)
    assert (inner.slots_TK[::3] == -1).all() and torch.equal(slots_TK[1::3], slots()[1::3])


def test_a_link_is_delayed_from_the_first_second_to_the_last():
    inner, injector = Recorder(), At(["slow-link:2:5:20ms@10-20"], 2, RANKS)
    backend = injector.wrap(inner)
    for injector.now_s in (0.0, 9.9, 10.0, 15.0, 19.9, 20.0, 30.0):
        backend.dispatch_send(None, slots(), None)
    assert inner.delays == [(5, 0.0), (5, 0.02), (5, 0.0)], "first without a delay: can it be delayed at all?"
    assert At(["slow-link:2:5:20ms"], 5, RANKS).wrap(inner) is inner, "the receiver delays it, and nobody else"


def test_links_of_a_backend_that_has_none_cannot_be_delayed():
    class Unlinked(Recorder):
        def delay_link(self, peer: int, seconds: float):
            raise ValueError("Unlinked has no link that can be delayed")

    with pytest.raises(ValueError, match="has no link that can be delayed"):
        At(["slow-link:2:5:20ms"], 2, RANKS).wrap(Unlinked())


@pytest.mark.parametrize(
    ("fault", "now_s", "wanted_s"),
    [
        ("late-compute:3:30ms", 0.0, 0.03),
        ("late-compute:3:3x", 0.0, 0.04),
        ("bursty:3:30ms", 1.9, 0.03),
        ("bursty:3:30ms", 2.1, None),
        ("bursty:3:30ms", 6.1, 0.03),
        ("late-compute:3:30ms@1-2", 2.0, None),
    ],
)
def test_experts_take_longer(fault, now_s, wanted_s, monkeypatch):
    """What is slept, where the experts themselves take 20 ms."""
    slept, clock = [], iter((100.0, 100.02))
    monkeypatch.setattr(inject, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: next(clock)))
    injector = object.__new__(At)
    injector.faults, injector.num_ranks, injector.now_s = [Injection.parse(fault)], RANKS, now_s
    backend = injector.wrap(Recorder())
    assert backend.dispatch_recv(None) == "received" and backend.combine_send(None, None) == "sent"
    assert slept == ([] if wanted_s is None else [pytest.approx(wanted_s)])


def test_faults_of_other_ranks_leave_a_backend_alone():
    inner = Recorder()
    assert At(["late-compute:3:2x", "bursty:2:2x", "slow-link:4:0:3ms"], 0, RANKS).wrap(inner) is inner


PAUSED = """
import sys, time
from eprt.diagnostics.inject import Injector
with Injector(sys.argv[1:], 0, 1):
    print("began", flush=True)
    time.sleep(200)
"""


@pytest.mark.parametrize("fault", ["slow-rank:0:2x@0-0.6", "stop:0:0.3s@0-"])
def test_a_process_is_paused_for_real_and_goes_on_afterwards(fault):
    with subprocess.Popen([sys.executable, "-c", PAUSED, fault], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"began\n"
        # What the kernel remembers: a look that comes late would miss a pause.
        wait_until(
            lambda: os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOHANG), "its being stopped and continued"
        )
        states: list[str] = []

        def goes_on() -> bool:
            states.append(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0])
            return states[-25:] == ["S"] * 25

        wait_until(goes_on, "half a second without a pause")
        process.send_signal(signal.SIGKILL)


def test_the_pauser_ends_with_its_parent():
    """A rank that is killed while it is paused leaves nobody behind."""
    with subprocess.Popen([sys.executable, "-c", PAUSED, "slow-rank:0:2x"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"began\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 100
    while time.monotonic() < deadline_s and any(_is_running(int(pid)) for pid in children):
        time.sleep(0.05)
    assert len(children) == 1 and not _is_running(int(children[0]))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
