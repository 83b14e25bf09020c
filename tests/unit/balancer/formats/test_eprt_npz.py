"""eprt's own .npz files."""

import numpy as np
import pytest
from eprt.balancer import RoutingTrace, read_load
from eprt.balancer.formats import eprt_npz


@pytest.mark.parametrize("tokens", [(5, 5), (5, 3)], ids=["equal layers", "unequal layers"])
def test_npz_with_traces(tmp_path, tokens):
    rng = np.random.default_rng(0)
    topk = tuple(rng.integers(-1, 4, size=(count, 2)).astype(np.int32) for count in tokens)
    sources = tuple(rng.integers(3, size=count).astype(np.int32) for count in tokens)
    load_WLE = rng.integers(0, 9, size=(3, 2, 4))
    windows = tuple(rng.integers(-1, 3, size=count).astype(np.int32) for count in tokens)
    eprt_npz.write(tmp_path / "a.npz", load_WLE, RoutingTrace(topk, sources, windows))
    file = read_load(tmp_path / "a.npz")
    np.testing.assert_array_equal(file.load_WLE, load_WLE)
    trace = file.trace
    for got, want in zip((*trace.topk_idx, *trace.source_gpu, *trace.window), (*topk, *sources, *windows), strict=True):
        np.testing.assert_array_equal(got, want)
    eprt_npz.write(tmp_path / "a.npz", load_WLE[:2], RoutingTrace(topk, sources, (windows[0] * 0, windows[1] * 0 + 2)))
    with pytest.raises(ValueError, match=r"topk_window\[layer 1, token 0\] = 2: load has windows 0 to 1"):
        read_load(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"topk_idx": np.zeros((1, 2, 2))}, "no array 'load'; it has topk_idx"),
        ({"load": np.ones((2, 3)), "topk_idx": np.zeros((1, 4, 2), int)}, "topk_idx has 1 layers, load has 2"),
        ({"load": np.ones((1, 3)), "topk_idx": np.full((1, 4, 2), 3)}, r"token 0, choice 0\] = 3: .*experts 0 to 2"),
        (
            {"load": np.ones((1, 3)), "topk_idx_0": np.zeros((4, 2), int), "topk_idx_2": np.zeros((4, 2), int)},
            "topk_idx_1",
        ),
        ({"load": np.array([[[1.0, np.nan]]])}, r"window 0: load\[layer 0, expert 1\] = nan"),
        ({"load": np.ones((1, 3)), "topk_idx": np.full((1, 1, 1), 2**32)}, r"topk_idx\[layer 0, .*= 4294967296"),
        (
            {"load": np.ones((1, 3)), "topk_idx": np.zeros((1, 1, 1), int), "source_gpu": np.full((1, 1), np.nan)},
            r"source_gpu\[layer 0\] has dtype float64; it must hold integers",
        ),
    ],
)
def test_a_bad_npz_is_named(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=f"a.npz: .*{message}"):
        read_load(tmp_path / "a.npz")
