"""What every rank does under emulation, beside the cases of tests/gpu that need no stream and no second process."""

import random
from collections.abc import Sequence

from eprt.ep.group import EPGroup
from tests.gpu import cases_nvlink
from tests.ranks.cases_ep import SKEWS, make_tokens


def verbs(group: EPGroup, shape: Sequence, num_sms: int) -> None:
    """All skews, by single verbs and by two in one launch: the oracle's bits. shape: as in cases_nvlink.SHAPES."""
    rng = random.Random(7)
    backend = cases_nvlink.make(group, cases_nvlink.make_config(group, shape, num_sms=num_sms))
    for number, skew in enumerate(SKEWS * 2):
        everyone = cases_nvlink.one_round(make_tokens(rng, backend.config, group.size, skew))
        cases_nvlink.poison(backend)
        calls = ("fused", "verbs")[(number + number // len(SKEWS)) % 2]
        cases_nvlink.check_once(backend, everyone, calls, (0,) * group.size)
    backend.close()
