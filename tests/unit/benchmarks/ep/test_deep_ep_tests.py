"""The figures that DeepEP's own tests print, as they are read from their output."""

from benchmarks.ep.deep_ep_tests import figures

LOW_LATENCY = """
[rank 0] Dispatch + combine bandwidth: 250.11 GB/s, avg_t=90.50 us, min_t=88.00 us, max_t=95.00 us
[rank 0] Dispatch bandwidth: 190.00 GB/s, avg_t=40.10 us | Combine bandwidth: 300.00 GB/s, avg_t=50.20 us
[rank 1] Dispatch bandwidth: 191.00 GB/s, avg_t=41.30 us | Combine bandwidth: 301.00 GB/s, avg_t=49.90 us
[rank 0] Dispatch send/recv time: 20.10 + 8.30 us | Combine send/recv time: 33.00 + 9.80 us
"""


def test_the_slowest_rank_counts():
    found = figures("test_low_latency.py", LOW_LATENCY)
    assert found["dispatch_us"] == 41.3 and found["combine_us"] == 50.2 and found["pair_us"] == 90.5
    assert (found["hook_dispatch_send_us"], found["hook_dispatch_recv_us"]) == (20.1, 8.3)
    assert (found["hook_combine_send_us"], found["hook_combine_recv_us"]) == (33.0, 9.8)


def test_milliseconds_become_microseconds_and_what_is_missing_is_left_out():
    assert figures("test_intranode.py", "[layout] Kernel performance: 0.034 ms\n") == {"layout_us": 34.0}
