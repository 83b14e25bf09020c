"""Counts of experts' tokens: the recorder that keeps choices on a device counts what the plain one does."""

import numpy as np
import pytest
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


def test_a_rank_counts_prefill_and_decode_apart_and_no_padding():
    recorder = LoadRecorder(num_layers=2, num_experts=6, top_k=2)
    recorder.begin(num_tokens=4, num_decode=1)
    recorder.record(1, torch.tensor([[0, 1], [2, 3], [2, -1], [-1, -1]]))
    want_PLE = np.zeros((2, 2, 6), dtype=np.int64)
    want_PLE[0, 1] = [0, 0, 2, 1, 0, 0]  # prefill: the last three tokens, masked choices left out
    want_PLE[1, 1] = [1, 1, 0, 0, 0, 0]
    np.testing.assert_array_equal(recorder.tokens_PLE, want_PLE)
    assert recorder.sample()[1].tolist() == [[0, 1], [2, 3], [2, -1], [-1, -1]]  # what is masked is no expert
    recorder.begin(num_tokens=0, num_decode=0)
    recorder.record(1, torch.empty(0, 2, dtype=torch.int64))
    np.testing.assert_array_equal(recorder.tokens_PLE, want_PLE)


@pytest.mark.parametrize("num_experts, dtype", [(8, np.int8), (128, np.int8), (256, np.int16)])
def test_a_rank_samples_the_same_tokens_in_every_layer_and_keeps_the_latest(num_experts, dtype):
    """Token t of step s chooses experts that tell (s, t), plus the layer: so rows of layers can be compared."""
    recorder = LoadRecorder(num_layers=2, num_experts=num_experts, top_k=2, sample_size=100)
    size = recorder.sample().nbytes
    for step in range(80):  # every 8th is looked at, 64 tokens of it
        recorder.begin(num_tokens=200, num_decode=0)
        first_T = torch.arange(200) % (num_experts - 1)
        for layer in range(2):
            recorder.record(layer, torch.stack((first_T + layer, torch.full((200,), step % 4 + layer)), dim=1))
    sample_LAK = recorder.sample()
    assert size == 0 and sample_LAK.shape == (2, 100, 2) and sample_LAK.dtype == dtype
    np.testing.assert_array_equal(sample_LAK[1], sample_LAK[0] + 1)
    assert len(np.unique(sample_LAK[0, :, 0])) > 5  # spread over the whole batch


def test_choices_counted_by_the_device_are_the_same():
    now = LoadRecorder(2, 6, 3)
    later = DeviceLoadRecorder(2, 6, 3, max_tokens=8, device=torch.device("cpu"))
    later.record(0, torch.zeros(2, 3, dtype=torch.int64))  # of a warm-up: does not count
    assert not later.tokens_PLE.any(), "counters never go down"
    for num_tokens, num_decode in ((5, 2), (0, 0), (8, 8), (1, 0)):
        for recorder in (now, later):
            recorder.begin(num_tokens, num_decode)
        for layer in range(2):
            chosen_TK = torch.randint(-1, 6, (num_tokens, 3))
            now.record(layer, chosen_TK)
            later.record(layer, chosen_TK[:3])  # in parts
            later.record(layer, chosen_TK[3:], first=3)
        for recorder in (now, later):
            recorder.end()
    with pytest.raises(ValueError, match=r"a step of 9 tokens: .* at most 8"):
        later.record(0, torch.zeros(5, 3, dtype=torch.int64), first=4)
    assert now.tokens_PLE.sum() > 0
    assert np.array_equal(now.tokens_PLE, later.tokens_PLE) and np.array_equal(now.sample(), later.sample())
