"""The low-latency CUDA kernels without a GPU: compiled as C++, bit for bit against the oracle (tests/emulated)."""

import platform
import shutil

import pytest

from tests.emulated.cases import layouts, verbs
from tests.emulated.device import emulated_ranks
from tests.gpu import cases_deep_ep

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ on x86-64"
)


def test_verbs_of_three_ranks_in_two_thread_blocks_each():
    emulated_ranks(3, verbs, shape=(256, 4, 4, 9, "fp8", False), num_sms=2)


def test_deep_eps_interface_with_hooks_late_weights_and_every_output_by_itself(monkeypatch):
    monkeypatch.setattr(cases_deep_ep, "SHAPES", [(512, 4, 4, 9)])
    emulated_ranks(2, cases_deep_ep.shapes, seed=2, cases_per_shape=6)


def test_the_counts_of_deep_eps_get_dispatch_layout():
    emulated_ranks(3, layouts)
