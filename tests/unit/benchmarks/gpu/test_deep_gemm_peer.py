"""How rows are laid out for DeepGEMM, and what is compared with it."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu import bench_deep_gemm, deep_gemm_peer
from benchmarks.gpu.deep_gemm_peer import PeerProduct


def test_each_expert_has_its_room_and_the_rows_come_back_in_their_order():
    x = torch.arange(1, 6).repeat_interleave(2).view(5, 2).bfloat16()
    placed, places = deep_gemm_peer._placed(x, [4, 0, 4, 2], [3, 0, 1, 1])
    assert placed[:, 0].tolist() == [1, 2, 3, 0, 4, 0, 0, 0, 5, 0]
    assert torch.equal(placed[places], x)
    assert torch.equal(PeerProduct(lambda: None, placed, places).rows(), x)
    assert PeerProduct(lambda: None, placed, None).rows() is placed


def test_a_peer_that_computes_something_else_is_not_timed():
    y, launches = torch.full((4, 8), 2.0), []
    product = PeerProduct(lambda: launches.append(1), y, None)
    wrong = PeerProduct(lambda: launches.append(2), torch.full((4, 8), 2.1), None)
    right = bench_deep_gemm.agreeing({"masked": wrong, "contiguous": product}, torch.full((4, 8), 2.001))
    assert right == {"contiguous": product} and launches == [2, 1]
    with pytest.raises(SystemExit, match="DeepGEMM differs from our product"):
        bench_deep_gemm.agreeing({"masked": wrong}, torch.full((4, 8), 2.001))
    with pytest.raises(SystemExit, match="differs"):
        bench_deep_gemm.agreeing({"dense": product}, torch.full((4, 8), float("nan")))


def test_without_the_package_the_remedy_is_named(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name}")

    monkeypatch.setattr(deep_gemm_peer.importlib, "import_module", missing)
    with pytest.raises(SystemExit, match="pip install sgl-deep-gemm"):
        deep_gemm_peer.load()
