"""Config: which settings are refused, and the memory that it asks for."""

import pytest

from eprt.compat import deep_ep


def test_config_refuses_queues_that_deep_ep_refuses():
    with pytest.raises(ValueError, match=r"nvl_chunked_send_tokens=8 .*recv_tokens=8"):
        deep_ep.Config(20, 8, 8)
    assert deep_ep.Config(24, 8, 256).get_nvl_buffer_size_hint(7168 * 2, 8) > 0
    assert deep_ep.Config().get_rdma_buffer_size_hint(7168 * 2, 8) == 0


def test_the_size_hint_follows_the_tokens_that_the_environment_names(monkeypatch):
    before = deep_ep.Config().get_nvl_buffer_size_hint(7168, 8)
    monkeypatch.setenv("EPRT_DEEP_EP_TOKENS", "8192")
    after = deep_ep.Config().get_nvl_buffer_size_hint(7168, 8)
    assert after == 2 * before > 3 * 8 * 8192 * 7168  # two results in fp8 and a combine in bf16, or one and one
