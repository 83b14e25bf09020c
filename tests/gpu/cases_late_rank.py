"""What every rank does in test_late_rank.py: whom the statistics of both modes charge, sums before the wire or not; and
how long a late rank is waited for."""

from typing import Any

from eprt.ep.group.group import EPGroup
from tests.gpu import cases_low_latency, cases_normal
from tests.ranks.cases_late_rank import only_the_late_rank_is_charged
from tests.ranks.cases_set_up import only_set_up_waits_for_a_late_rank

LATE_S = 0.1  # a twentieth of it is far more than ranks are apart


def on_gpus(group: EPGroup) -> None:
    modes: tuple[Any, ...] = (cases_low_latency, cases_normal)
    for cases in modes:
        for exact in (False, True):
            num_slots = 8 if cases is cases_low_latency else 8 * group.size
            config = cases.make_config(group, (2048, num_slots, 4, 32, "same", exact))
            backend = cases.make(group, config)
            for late in {0, group.size - 1}:
                only_the_late_rank_is_charged(group, backend, late, LATE_S)
            backend.close()


def while_setting_up(group: EPGroup) -> None:
    modes: tuple[Any, ...] = (cases_low_latency, cases_normal)
    for cases in modes:
        num_slots = 8 if cases is cases_low_latency else 8 * group.size
        config = cases.make_config(group, (2048, num_slots, 4, 32, "same", False), timeout_s=2.0)
        backend = cases.make(group, config)
        only_set_up_waits_for_a_late_rank(group, backend, late_s=4.0)
        backend.close()
