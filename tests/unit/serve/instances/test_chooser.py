"""Which instance begins a sequence: its tier's deadline and order are kept between the queues of several instances."""

import asyncio
import itertools
import random
from collections import Counter

import pytest

from eprt.engine.sampling_params import SamplingParams
from eprt.serve.errors import ApiError
from eprt.serve.ranks import messages as msg
from eprt.serve.tiers.table import in_tier
from tests.unit.serve.instances.cases import GivenFleet

_numbers = itertools.count()
TIERS = ("--tier", "max=0.5,9", "--tier", "pro=2,9", "--tier", "base=20,9", "--max-num-seqs", "64", "--max-queue", "99")
PARAMS = SamplingParams(max_tokens=8)


def run(life, *flags: str) -> None:
    async def go() -> None:
        life(GivenFleet(*flags))

    asyncio.run(go())


def fill(fleet: GivenFleet, name: str, tier, num_tokens: int) -> None:
    """A prompt of a tier waits there."""
    instance = fleet.instances[name]
    request_id = f"{name}-{tier.rank}-{num_tokens}-{next(_numbers)}"
    rank = instance.pool.router.assign(request_id, [5] * num_tokens)
    instance.forecast.start(request_id, rank, tier, num_tokens)


def test_a_prompt_goes_before_those_of_tiers_behind_wherever_they_wait():
    """Fewer tokens wait on prefill-0, but they go first."""

    def life(fleet: GivenFleet) -> None:
        best, _, last = fleet.options.tiers
        fill(fleet, "prefill-0", best, 600)
        fill(fleet, "prefill-1", last, 3000)
        chosen = {str(fleet.chooser.choose_any([9] * 40, None, best)[0]) for _ in range(8)}
        assert chosen == {"prefill-1"}
        assert {str(fleet.chooser.choose_any([9] * 40, None, last)[0]) for _ in range(8)} == {"prefill-0"}
        fleet.submit([([9] * 40, in_tier(PARAMS, best))], None, best)

    run(life, "--prefill", "2", "--decode", "1", *TIERS)


def test_short_prompts_are_spread_over_decode_instances():
    def life(fleet: GivenFleet) -> None:
        names = Counter(str(fleet.chooser.choose_any([9] * 40)[0]) for _ in range(40))
        assert set(names) == {"decode-0", "decode-1"}, "nobody has any of it"
        fill(fleet, "decode-0", fleet.options.tiers[0], 300)
        assert {str(fleet.chooser.choose_any([9] * 40)[0]) for _ in range(8)} == {"decode-1"}

    run(life, "--prefill", "1", "--decode", "2", *TIERS, "--local-prefill-tokens", "64", "--decode-balance", "kv")


@pytest.mark.parametrize("local_tokens", [0, 64])
@pytest.mark.parametrize("num_prefill", [1, 2, 3, 4])
def test_a_deadline_is_kept_wherever_any_instance_can_keep_it(num_prefill, local_tokens):
    """Random queues. Who is refused would have been late everywhere; who is taken, is in time where it begins, and its
    order comes with it: to where it begins, where it is handed to, and where it begins again."""
    draw = random.Random(num_prefill)
    num_refused = num_taken = 0

    def life(fleet: GivenFleet) -> None:
        nonlocal num_refused, num_taken
        tiers, tier_of, began_at = fleet.options.tiers, {}, {}
        busy = draw.choice([0, 1, 9])
        for name in [name for name in fleet.instances if local_tokens or name.startswith("prefill")]:
            for _ in range(draw.randrange(busy + 1)):
                fill(fleet, name, draw.choice(tiers), draw.randrange(300, 1500))
        for _ in range(12):
            tier, prompt = draw.choice(tiers), [draw.randrange(90) for _ in range(draw.choice([20, 200]))]
            times = {}
            for name, each in fleet.instances.items():
                if each.role == "prefill" or len(prompt) <= local_tokens:
                    rank, _, uncached = each.pool.router.predict(prompt)
                    times[name] = each.forecast.first_token_times(rank, tier, uncached)
            hopeless = any(alone > tier.ttft_s for _, alone in times.values())
            in_time = {name for name, (late, _) in times.items() if late <= tier.ttft_s}
            try:
                (request_id,) = fleet.submit([(prompt, in_tier(PARAMS, tier))], None, tier).request_ids
            except ApiError as error:
                assert error.code == "tier_busy" and not in_time
                num_refused += 1
                continue
            num_taken += 1
            (began,) = [n for n, one in fleet.instances.items() if one.pool.sequences.find(request_id) is not None]
            assert began in in_time or hopeless
            tier_of[request_id], began_at[request_id] = tier, began
        for name in list(fleet.given):
            check_order(fleet.sent(name), tier_of)
        held = [(name, request_id) for request_id, name in began_at.items() if name.startswith("prefill")][::2]
        for name, request_id in held:
            fleet.hold(name, request_id)
        assert sum(check_order(fleet.sent(f"decode-{i}"), tier_of) for i in range(2)) == len(held)
        fleet.lose_instance("decode-0")
        for name in [name for name in fleet.given if name != "decode-0"]:
            check_order(fleet.sent(name), tier_of)

    for _ in range(8):
        run(
            life,
            *("--prefill", str(num_prefill), "--decode", "2", *TIERS, "--local-prefill-tokens", str(local_tokens)),
        )
    assert num_taken > 20 and (num_refused > 0 or num_prefill > 1)


def check_order(messages: list, tier_of: dict) -> int:
    """How many sequences come with these messages; each has its tier's order."""
    adds = [m.request if isinstance(m, msg.Adopt) else m for m in messages if isinstance(m, msg.Adopt | msg.AddRequest)]
    for add in adds:
        assert add.params.priority == in_tier(PARAMS, tier_of[add.request_id]).priority
    return len(adds)
