"""EPMoE(mask_lost_ranks=True): the outputs are right, to the bit, whatever a rank was doing when it was killed."""

import pytest

from tests.ranks.launch_torch import finish, start_torch_ranks

CASES = "tests.ranks.cases_masked"


def run(case: str, num_ranks: int, said: str, killed: set[int], **options) -> None:
    processes = start_torch_ranks(num_ranks, f"{CASES}:{case}", **options)
    for rank, (status, output) in enumerate(finish(processes, timeout_s=600)):
        assert status == (-9 if rank in killed else 0), f"rank {rank} ended with {status}:\n{output}"
        assert rank in killed or said in output, output


@pytest.mark.parametrize(
    "deaths",
    [
        {1: ["dispatch_send", 9]},
        {0: ["dispatch_recv", 4]},
        {2: ["combine_send", 7], 1: ["dispatch_recv", 7]},
        {0: ["combine_recv", 3], 3: ["combine_recv", 12]},
    ],
)
def test_a_call_goes_on_without_the_lost(deaths):
    run("masked", 4, "MASKED", set(deaths), deaths=deaths)


def test_experts_without_a_replica_are_named():
    run("without_replicas", 2, "REFUSED", {1})
