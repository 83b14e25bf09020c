"""One exchange for layers that share it, also after they have moved."""

import pytest
import torch

from eprt import EPGroup, MoEConfig
from eprt.ep.exchange import Exchange, make_exchange

CONFIG = MoEConfig(64, 48, 8, 2, dtype=torch.float32)


def test_layers_that_move_alike_go_on_with_one_exchange():
    first = make_exchange(CONFIG, EPGroup.single(), 8, modes={"normal": None, "low_latency": 16})
    moved = first.moved_to(torch.bfloat16, "cpu")
    assert moved is first.moved_to(torch.bfloat16, "cpu") and moved is not first
    assert set(moved) == {"normal", "low_latency"}
    assert [moved[mode].config.dtype for mode in moved] == [torch.bfloat16] * 2
    assert moved["low_latency"].config.num_max_tokens_per_rank == 16
    assert moved.moved_to(torch.float32, "cpu") is first  # and back
    first.close()


@pytest.mark.parametrize("closed", [0, 1])
def test_either_frees_both(closed):
    first = make_exchange(CONFIG, EPGroup.single(), 8)
    both = first, first.moved_to(torch.bfloat16, "cpu")
    both[closed].close()
    for exchange in both:
        with pytest.raises(RuntimeError, match="closed"):
            tokens = torch.zeros(1, 64, dtype=exchange["normal"].config.dtype)
            exchange["normal"].dispatch_send(tokens, torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))
    both[closed].close()


def test_what_was_put_together_by_hand_does_not_move():
    exchange = Exchange({})
    with pytest.raises(ValueError, match="was not made by make_exchange, so it cannot be made anew elsewhere"):
        exchange.moved_to(torch.bfloat16, "cpu")
    exchange.close()


def test_the_backend_is_chosen_anew_on_another_device(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "eprt.ep.exchange.make_backend", lambda name, config, group: asked.append((name, config.device))
    )
    exchange = make_exchange(CONFIG, EPGroup.single(), 8, "cpu")
    exchange.moved_to(torch.bfloat16, "cpu")
    exchange.moved_to(torch.float32, "cuda")
    assert asked == [("cpu", "cpu"), ("cpu", "cpu"), ("auto", "cuda")]
