"""The cpu backend in one process: all bits against the oracle, every instruction set, every complaint."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eprt.ep import reference
from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.reference import SentTokens
from eprt.ep.registry import make_backend
from eprt.ops import native

LEVELS = ("scalar", "avx2", "avx512")
FP8_EDGES = [0.0, -0.0, 1e-38, 2.0**-10, 1.5 * 2.0**-9, 2.0**-6, -(2.0**-6) * 0.99, 17.0, 448.0, -448.0, 432.0, 1e30]


@pytest.fixture
def group():
    group = EPGroup.single()
    yield group
    group.close()


@pytest.fixture(params=LEVELS)
def isa(request):
    """Runs the test once on every level this CPU has."""
    before = (native.load(), native.isa())[1]
    if LEVELS.index(request.param) > native.ISA_NAMES.index(native.detected_isa()):
        pytest.skip(f"this CPU has no {request.param}")
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_round_trip(config: EPConfig, sent: SentTokens) -> None:
    backend = make_backend("cpu", config, EPGroup.single())
    handle = backend.dispatch_send(sent.x_TH, sent.slot_idx_TK, sent.topk_weights_TK)
    got, expected = backend.dispatch_recv(handle), reference.received(0, config, [sent])
    assert torch.equal(got.recv_count_E, expected.recv_count_E)
    assert same_bits(got.x_RH, expected.x_RH)
    assert (got.scale_RG is None) == (expected.scale_RG is None)
    if got.scale_RG is not None:
        assert same_bits(got.scale_RG, expected.scale_RG)
    generator = torch.Generator().manual_seed(0)
    y_RH = torch.randn(got.x_RH.shape, generator=generator).to(config.dtype)
    backend.combine_send(y_RH, handle)
    assert same_bits(backend.combine_recv(handle), reference.combined(0, config, (0,), [sent], [y_RH]))
    backend.close()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_bits_equal_the_oracle(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    hidden = data.draw(st.integers(1, 300))
    num_slots, top_k, T = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8)), data.draw(st.integers(0, 5))
    payload = data.draw(st.sampled_from(["same", "fp8"]))
    slots = data.draw(st.lists(st.integers(-1, num_slots - 1), min_size=T * top_k, max_size=T * top_k))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x_TH = torch.randn(T, hidden, generator=generator) * data.draw(st.sampled_from([1e-20, 1e-3, 1.0, 1e4]))
    for i, value in enumerate(data.draw(st.lists(st.sampled_from(FP8_EDGES), max_size=x_TH.numel()))):
        x_TH.view(-1)[i] = value
    weights_TK = torch.randn(T, top_k, generator=generator)
    config = EPConfig(hidden, num_slots, top_k, num_max_tokens_per_rank=5, dtype=dtype, payload=payload)
    check_round_trip(config, SentTokens(x_TH.to(dtype), torch.tensor(slots).view(T, top_k).int(), weights_TK))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("payload", ["same", "fp8"])
@pytest.mark.parametrize("hidden", [1, 100, 176, 2048])
def test_every_instruction_set_gives_the_same_bits(isa, dtype, payload, hidden):
    generator = torch.Generator().manual_seed(hidden)
    x_TH = torch.randn(6, hidden, generator=generator) * torch.logspace(-6, 6, 6)[:, None]
    slot_idx_TK = torch.randint(-1, 8, (6, 5), generator=generator)
    config = EPConfig(hidden, 8, 5, 6, dtype=dtype, payload=payload)
    check_round_trip(config, SentTokens(x_TH.to(dtype), slot_idx_TK, torch.rand(6, 5, generator=generator)))


def test_every_bf16_value_in_fp8(isa):
    """All 65536 bit patterns, 128 neighbours to a group, NaNs and infinities included."""
    x_TH = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(512, 128)
    config = EPConfig(128, 1, 1, 512, payload="fp8")
    backend = make_backend("cpu", config, EPGroup.single())
    handle = backend.dispatch_send(x_TH, torch.zeros(512, 1, dtype=torch.int64), torch.ones(512, 1))
    got = backend.dispatch_recv(handle)
    values, scales = reference.quantize(x_TH)
    finite_T = x_TH.isfinite().all(1)
    assert same_bits(got.x_RH[finite_T], values[finite_T])
    assert same_bits(got.scale_RG[finite_T], scales[finite_T])
    # What is not a number stays so: a group with a NaN or an infinity must not come out as plausible values.
    x = reference.dequantize(got.x_RH, got.scale_RG)
    assert x[x_TH.isnan()].isnan().all() and not x[x_TH.isinf()].isfinite().any()


def test_nan_outputs_stay_nan(isa):
    config = EPConfig(40, 2, 2, 1)
    backend = make_backend("cpu", config, EPGroup.single())
    handle = backend.dispatch_send(torch.ones(1, 40).bfloat16(), torch.tensor([[0, 1]]), torch.ones(1, 2))
    y_RH = torch.ones(2, 40).bfloat16()
    backend.dispatch_recv(handle)
    y_RH[1, 7], y_RH[0, 39] = float("nan"), float("inf")
    backend.combine_send(y_RH, handle)
    y_TH = backend.combine_recv(handle)
    assert y_TH[0, 7].isnan() and y_TH[0, 39] == float("inf") and (y_TH[0, :7] == 2).all()


def test_many_rows_on_several_threads(group):
    """Enough bytes for the OpenMP path."""
    generator = torch.Generator().manual_seed(0)
    x_TH = torch.randn(96, 2048, generator=generator).bfloat16()
    slot_idx_TK = torch.randint(16, (96, 8), generator=generator)
    check_round_trip(EPConfig(2048, 16, 8, 96), SentTokens(x_TH, slot_idx_TK, torch.rand(96, 8, generator=generator)))


# -- modes --


def test_low_latency_keeps_its_shapes_and_addresses(group):
    backend = make_backend("cpu", EPConfig(64, 4, 2, 8, mode="low_latency", num_buffers=1), group)
    seen = set()
    for T in (0, 8, 3):
        x_TH = torch.full((T, 64), float(T)).bfloat16()
        handle = backend.dispatch_send(x_TH, torch.ones(T, 2, dtype=torch.int32), torch.ones(T, 2))
        got = backend.dispatch_recv(handle)
        seen.add((got.x_RH.data_ptr(), got.recv_count_E.data_ptr(), tuple(got.x_RH.shape)))
        assert got.recv_count_E.tolist() == [0, 2 * T, 0, 0]
        y_RH = backend.combine_buffer(handle, got)
        assert y_RH.shape == got.x_RH.shape == (backend.max_rows, 64)
        y_RH[: 2 * T] = got.x_RH[: 2 * T]
        backend.combine_send(y_RH, handle)
        assert torch.equal(backend.combine_recv(handle), 2 * x_TH)
    assert len(seen) == 1, "shapes or addresses changed"
    backend.close()


def test_inputs_need_not_be_contiguous(group):
    config = EPConfig(8, 4, 2, 4, dtype=torch.float32)
    backend = make_backend("cpu", config, group)
    x_TH, slots, weights = torch.randn(8, 4).T, torch.randint(4, (2, 4)).T, torch.rand(2, 4).T
    handle = backend.dispatch_send(x_TH, slots, weights)
    got = backend.dispatch_recv(handle)
    sent = SentTokens(x_TH, slots, weights)
    assert same_bits(got.x_RH, reference.received(0, config, [sent]).x_RH)
    y_RH = torch.randn(8, 8).T
    backend.combine_send(y_RH, handle)
    assert same_bits(backend.combine_recv(handle), reference.combined(0, config, (0,), [sent], [y_RH]))


# -- complaints --

GOOD = (torch.zeros(2, 16).bfloat16(), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3))


@pytest.mark.parametrize("bad_slot", [-2, 4, 1 << 40])
def test_slot_out_of_range_changes_nothing(group, bad_slot):
    backend = make_backend("cpu", EPConfig(16, 4, 3, 4), group)
    slots = torch.zeros(2, 3, dtype=torch.int64)
    slots[1, 2] = bad_slot
    with pytest.raises(ValueError, match=rf"\[rank 0/1\] .*slot_idx_TK\[1, 2\] = {bad_slot} is not in -1..3"):
        backend.dispatch_send(GOOD[0], slots, GOOD[2])
    handle = backend.dispatch_send(*GOOD)
    assert handle.epoch == 1
    assert backend.dispatch_recv(handle).recv_count_E.tolist() == [6, 0, 0, 0]


@pytest.mark.parametrize(
    "position, wrong, message",
    [
        (0, torch.zeros(2, 16), r"x_TH is torch.float32 \(2, 16\), expected torch.bfloat16 \(T, 16\)"),
        (0, torch.zeros(2, 17).bfloat16(), r"x_TH is .*\(2, 17\)"),
        (0, torch.zeros(2, 1, 16).bfloat16(), r"x_TH is .*\(2, 1, 16\)"),
        (0, torch.zeros(5, 16).bfloat16(), "5 tokens, but num_max_tokens_per_rank=4; split them into rounds"),
        (1, torch.zeros(2, 3), r"slot_idx_TK is torch.float32 \(2, 3\), expected torch.int32 or torch.int64 \(2, 3\)"),
        (1, torch.zeros(2, 2, dtype=torch.int32), r"slot_idx_TK is .*\(2, 2\)"),
        (2, torch.zeros(2, 3).double(), r"topk_weights_TK is torch.float64 .*expected torch.float32"),
        (2, torch.zeros(1, 3), r"topk_weights_TK is .*\(1, 3\)"),
    ],
)
def test_wrong_input_is_named(group, position, wrong, message):
    backend = make_backend("cpu", EPConfig(16, 4, 3, 4), group)
    arguments = list(GOOD)
    arguments[position] = wrong
    with pytest.raises(ValueError, match=rf"\[rank 0/1\] dispatch_send: {message}"):
        backend.dispatch_send(*arguments)


@pytest.mark.parametrize("name", ["cpu", "local", "reference"])
def test_a_handle_goes_back_to_its_own_backend(group, name):
    one, other = (make_backend(name, EPConfig(16, 4, 3, 4), group) for _ in range(2))
    handle = one.dispatch_send(*GOOD)
    with pytest.raises(ValueError, match=r"\[rank 0/1\] dispatch_recv: this handle comes from another backend"):
        other.dispatch_recv(handle)
    assert one.dispatch_recv(handle).recv_count_E.sum() == 6


def test_wrong_outputs_and_handles(group):
    backend = make_backend("cpu", EPConfig(16, 4, 3, 4), group)
    handle = backend.dispatch_send(*GOOD)
    with pytest.raises(RuntimeError, match="combine_send: the handle of epoch 1 waits for dispatch_recv"):
        backend.combine_send(torch.zeros(6, 16).bfloat16(), handle)
    backend.dispatch_recv(handle)
    for y_RH in (torch.zeros(5, 16).bfloat16(), torch.zeros(6, 16), torch.zeros(6, 8).bfloat16()):
        with pytest.raises(ValueError, match=r"y_RH is .*expected torch.bfloat16 \(6, 16\), one row for each received"):
            backend.combine_send(y_RH, handle)
    with pytest.raises(ValueError, match="takes no signal"):
        backend.combine_send(torch.zeros(6, 16).bfloat16(), handle, signal=object())
    with pytest.raises(ValueError, match="num_rounds=0"):
        backend.dispatch_send(*GOOD, num_rounds=0)


def test_use_after_close(group):
    backend = make_backend("cpu", EPConfig(16, 4, 3, 4), group)
    handle = backend.dispatch_send(*GOOD)
    backend.close()
    backend.close()
    calls = [lambda: backend.dispatch_send(*GOOD), lambda: backend.dispatch_recv(handle), backend.stats]
    for call in calls:
        with pytest.raises(RuntimeError, match="this backend is closed"):
            call()


@pytest.mark.parametrize(
    "field, value",
    [
        ("hidden_size", 0),
        ("top_k", 65),
        ("dtype", torch.float16),
        ("payload", "fp4"),
        ("mode", "fast"),
        ("timeout_s", 0.0),
        ("num_buffers", 0),
    ],
)
def test_bad_config(field, value):
    good = {"hidden_size": 8, "num_slots": 8, "top_k": 2, "num_max_tokens_per_rank": 4}
    with pytest.raises(ValueError, match=f"EPConfig.{field}="):
        EPConfig(**{**good, field: value})


def test_unknown_backend(group):
    with pytest.raises(ValueError, match="no backend 'mpi'; there are: auto, reference, cpu"):
        make_backend("mpi", EPConfig(8, 8, 2, 4), group)
