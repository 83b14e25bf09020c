"""Counts of experts' tokens: the recorder that keeps choices on a device counts what the plain one does."""

import numpy as np
import torch

from eprt.ep.placement.load import DeviceLoadRecorder, LoadRecorder

LAYERS, EXPERTS, TOP_K, MOST_TOKENS = 3, 8, 2, 64  # the last layer is an MTP layer


def test_both_recorders_count_steps_with_drafts_alike():
    """Steps of changing sizes, each followed by the MTP layer's passes over the same tokens and over its guesses."""
    rng = np.random.default_rng(0)
    plain = LoadRecorder(LAYERS, EXPERTS, TOP_K, sample_size=4096)
    device = DeviceLoadRecorder(LAYERS, EXPERTS, TOP_K, MOST_TOKENS, torch.device("cpu"), num_draft_layers=1)
    want_PLE = np.zeros((2, LAYERS, EXPERTS), dtype=np.int64)

    def choose(layer: int, num_tokens: int, num_decode: int) -> None:
        chosen_TK = rng.integers(-1, EXPERTS, (num_tokens, TOP_K))  # -1: masked
        for recorder in (plain, device):
            recorder.record(layer, torch.from_numpy(chosen_TK))
        for phase, part in enumerate((chosen_TK[num_decode:], chosen_TK[:num_decode])):
            for expert in part[part >= 0]:
                want_PLE[phase, layer, expert] += 1

    for _ in range(40):
        num_tokens = int(rng.integers(0, MOST_TOKENS + 1))
        num_decode, num_requests = int(rng.integers(0, num_tokens + 1)), int(rng.integers(0, 9))
        for recorder in (plain, device):
            recorder.begin(num_tokens, num_decode)
        for layer in range(LAYERS - 1):
            choose(layer, num_tokens, num_decode)
        for recorder in (plain, device):
            recorder.end()
        choose(LAYERS - 1, num_tokens, num_decode)
        for recorder in (plain, device):
            recorder.count_drafts(num_tokens)
            recorder.begin_drafts(num_requests)
        choose(LAYERS - 1, num_requests, num_requests)
        for recorder in (plain, device):
            recorder.count_drafts(num_requests)
    assert np.array_equal(plain.tokens_PLE, want_PLE) and np.array_equal(device.tokens_PLE, want_PLE)
    steps = plain.sample_steps()
    assert len(steps) == len(plain.sample()[0]) and set(steps.tolist()) <= set(range(1, 41, 8)), "every eighth step"
    assert len(plain.sample()[0]) > 100 and np.array_equal(plain.sample(), device.sample())
