"""How the SMs of a GPU are divided between sending and the experts."""

from eprt.config import MoEConfig
from eprt.layers.sm_split import MOST_SMS, send_sms, tile_rows


def test_sms_send_beside_the_experts_only_where_that_pays():
    config = MoEConfig(hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8, weight_format="fp8")
    for tokens in (1, 16, 64, 128, 512):
        assert send_sms(config, tokens, 8, 32, sms=132) == 0, "on one NVLink host sending is short"
        assert send_sms(config, tokens, 8, 32, sms=132, link_gb_s=1e9) == 0
    slow = [send_sms(config, tokens, 8, 32, sms=132, link_gb_s=25.0) for tokens in (16, 64, 128, 512)]
    assert 0 < slow[1] <= slow[2] <= slow[3] <= MOST_SMS, "over a network of 200 Gb/s it is not"
    assert [tile_rows(config, tokens, 8, 256) for tokens in (1, 64, 80, 128, 4096)] == [16, 16, 32, 32, 64]
