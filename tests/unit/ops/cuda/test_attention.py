"""Which kernel attends decodes on GPUs, without a GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

from eprt.ops.attention import PagedContext

pytest.importorskip("triton")
from eprt.ops.cuda import attention, mla_eprt, mla_flashmla, mla_triton


@pytest.fixture
def has(monkeypatch):
    """has(names): which of the kernels that may be missing are there."""

    def there(*names: str) -> None:
        attention.kernels.cache_clear()
        for name, module in (("eprt", mla_eprt), ("flashmla", mla_flashmla)):
            monkeypatch.setattr(module, "is_installed", lambda name=name: name in names)

    there()
    yield there
    attention.kernels.cache_clear()
    attention._log_choice.cache_clear()


@pytest.fixture
def chosen(monkeypatch):
    def choose(
        wanted: str,
        page_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        prompts: bool = False,
        fp8: bool = False,
    ):
        attention.kernels.cache_clear()
        monkeypatch.setenv("EPRT_GPU_ATTENTION", wanted)
        q, r = torch.empty(2, 128, 512, dtype=dtype), torch.empty(2, 128, 64, dtype=dtype)
        pages = torch.empty(3, page_size, 656 if fp8 else 576, dtype=torch.uint8 if fp8 else dtype)
        table, length = torch.empty(2, 3), torch.empty(2)
        return attention.kernel(q, r, PagedContext(pages, table, length, torch.zeros(3) if prompts else None))

    return choose


def test_the_first_kernel_that_is_there_and_takes_it_is_used(has, chosen):
    assert chosen("auto") is chosen("triton") is mla_triton
    has("flashmla")
    assert chosen("auto") is chosen("flashmla") is mla_flashmla
    assert chosen("triton") is chosen("auto", prompts=True) is chosen("flashmla", prompts=True) is mla_triton
    assert chosen("auto", page_size=16) is chosen("auto", dtype=torch.float32) is mla_triton
    has("eprt", "flashmla")
    assert attention.installed()[-1] == "triton" and chosen("eprt") is mla_eprt
    assert chosen("eprt", page_size=16) is chosen("eprt", page_size=256) is mla_eprt
    assert chosen("auto", page_size=16) is chosen("auto", prompts=True) is chosen("eprt", prompts=True) is mla_eprt
    assert chosen("auto", dtype=torch.float32) is mla_triton


def test_only_some_kernels_take_an_fp8_cache(has, chosen):
    has("flashmla")
    assert chosen("auto", fp8=True) is chosen("triton", fp8=True) is mla_triton
    has("eprt", "flashmla")
    assert chosen("auto", fp8=True) is chosen("eprt", fp8=True, page_size=16) is mla_eprt
    assert chosen("auto", fp8=True, page_size=8) is chosen("auto", fp8=True, dtype=torch.float32) is mla_triton
    with pytest.raises(ValueError, match=r"=flashmla: it takes a bfloat16 cache .*, not torch.uint8 .*; use auto"):
        chosen("flashmla", fp8=True)


@pytest.mark.parametrize("name, package", [("eprt", r"pip install 'eprt\[cuda13\]'"), ("flashmla", "sgl-flash-mla")])
def test_a_kernel_that_is_missing_is_told_with_its_package(has, chosen, name, package):
    with pytest.raises(ImportError, match=rf"EPRT_GPU_ATTENTION={name}: it is not installed; .*{package}"):
        chosen(name)


def test_a_kernel_that_cannot_is_told_with_the_reason(has, chosen):
    has("eprt", "flashmla")
    with pytest.raises(ValueError, match=r"=flashmla: it takes pages of 64 tokens .*, not 16; use auto"):
        chosen("flashmla", page_size=16)
    with pytest.raises(
        ValueError, match=r"=eprt: it takes contiguous pages of 1 or a multiple of 16 tokens, not .*; use auto"
    ):
        chosen("eprt", page_size=40)
    with pytest.raises(ValueError, match=r"=eprt: it takes a bfloat16 or fp8 cache and bfloat16 queries, not .*"):
        chosen("eprt", dtype=torch.float32)


def test_the_log_says_once_who_attends_and_why_not_the_first(has, chosen, caplog):
    caplog.set_level("INFO")
    first, (_, install) = next(iter(attention._KERNELS.items()))
    has(first)
    for _ in range(2):
        for wanted, options in (("auto", {"dtype": torch.float32}), ("auto", {}), ("triton", {})):
            chosen(wanted, **options)
        chosen("auto", prompts=True)
    has()
    chosen("auto")
    said = [record.message for record in caplog.records]
    assert len(said) == 4
    assert said[1:3] == [f"decodes are attended by {first}", "decodes are attended by triton"]
    assert f"by triton; not by {first}: it takes a bfloat16 " in said[0]
    assert f"by triton; not by {first}: it is not installed ({install})" in said[3]


@pytest.mark.parametrize("cuts, whole", [("any", False), ("none", True), ("", False)])
def test_requests_are_cut_or_not_as_asked(monkeypatch, cuts, whole):
    monkeypatch.setenv("EPRT_GPU_ATTENTION_CUTS", cuts)
    asked = []
    monkeypatch.setattr(mla_eprt.mla_decode, "make_schedule", lambda *inputs: asked.append(inputs))
    monkeypatch.setattr(mla_eprt.mla_decode, "mla_decode", lambda q, *where: q)
    q, plans = torch.randn(2, 4, 576), {}
    context = PagedContext(torch.zeros(3, 64, 576), torch.zeros(2, 1), torch.ones(2))
    for _ in range(2):
        assert torch.equal(mla_eprt.attend(q[..., :512], q[..., 512:], context, 0.1, plans), q)
    assert asked == [(context.seq_len_B, None, 4, 2, whole)] and plans == {"eprt": None}


@pytest.mark.parametrize("rounding, terms", [("fp8", 1), ("2xfp8", 2), ("", 1)])
def test_queries_over_an_fp8_cache_are_rounded_as_asked(monkeypatch, rounding, terms):
    monkeypatch.setenv("EPRT_GPU_ATTENTION_QUERY", rounding)
    monkeypatch.setattr(mla_eprt.mla_decode, "make_schedule", lambda *inputs: None)
    monkeypatch.setattr(mla_eprt.mla_decode_fp8, "mla_decode_fp8", lambda q, *rest: q * rest[-1])
    q = torch.randn(2, 4, 576)
    context = PagedContext(torch.zeros(3, 64, 656, dtype=torch.uint8), torch.zeros(2, 1), torch.ones(2))
    assert torch.equal(mla_eprt.attend(q[..., :512], q[..., 512:], context, 0.1), q * terms)


@pytest.mark.parametrize("legacy", [False, True])
def test_flashmla_is_asked_for_its_kernels_for_hopper_where_they_are_an_option(monkeypatch, legacy):
    """PyPI's sgl-flash-mla has them behind use_legacy=True; the repository at an old commit has no such option."""
    asked = []

    def current(q, cache, table, length, value_size, plan, softmax_scale=None):
        asked.append({})
        return q[..., :value_size], None

    def with_legacy(q, cache, table, length, value_size, plan, softmax_scale=None, use_legacy=False):
        asked.append({"use_legacy": use_legacy})
        return q[..., :value_size], None

    library = SimpleNamespace(
        flash_mla_with_kvcache=with_legacy if legacy else current, get_mla_metadata=lambda: ("a plan", None)
    )
    monkeypatch.setitem(sys.modules, "flash_mla", library)
    q, plans = torch.randn(2, 4, 576), {}
    context = PagedContext(torch.zeros(3, 64, 576), torch.zeros(2, 1), torch.ones(2))
    out = mla_flashmla.attend(q[..., :512], q[..., 512:], context, 0.1, plans)
    assert torch.equal(out, q[..., :512]) and plans == {"flashmla": "a plan"}
    assert asked == [{"use_legacy": True} if legacy else {}]
