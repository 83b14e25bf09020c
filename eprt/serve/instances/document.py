"""eprt.instances/1: the instances of a server and what goes from one to another, for GET /v1/eprt/instances."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from eprt.serve.instances.fleet import Fleet
from eprt.serve.instances.handoffs import Offer
from eprt.serve.instances.instance import Instance
from eprt.serve.ranks.pool import RankPool

SCHEMA = "eprt.instances/1"
_MOST_OFFERS = 64  # told one by one


def instances_document(fleet: Fleet) -> dict[str, Any]:
    document = {
        "schema": SCHEMA,
        "instances": [_instance(fleet, each) for each in fleet.instances.values()],
        "starting": [
            {"role": one.role, "name": one.name or None, "ranks": one.num_ranks}
            for one in (fleet.starter.pending if fleet.starter is not None else ())
        ],
        "instances_lost": fleet.num_lost,
        "handoffs": {
            "under_way": len(fleet.handoffs.offers),
            "oldest": _oldest_offers(list(fleet.handoffs.offers.values())),
            **asdict(fleet.handoffs.counts),
        },
        "tiers": tiers_document([each.pool for each in fleet.instances.values()]),
    }
    return document if fleet.scale_document is None else {**document, "scale": fleet.scale_document()}


def group_document(pool: RankPool) -> dict[str, Any] | None:
    """The same of a server that is one group of ranks, as the page has it; None without tiers."""
    tiers = tiers_document([pool])
    return {"schema": SCHEMA, "instances": [], "instances_lost": 0, "handoffs": None, "tiers": tiers} if tiers else None


def tiers_document(pools: Sequence[RankPool]) -> list[dict[str, Any]]:
    """Each tier: its limits, its sequences that are there now, and what its requests got since the start."""
    now = sum((pool.sequences.count_tiers() for pool in pools), Counter())
    counts = pools[0].metrics.tiers.to_json() if pools else []
    return [{**tier, "sequences": now[tier["name"]]} for tier in counts]


def _oldest_offers(offers: Sequence[Offer]) -> list[dict[str, Any]]:
    now_s = time.monotonic()
    return [
        {
            "request": offer.request_id,
            "from": str(offer.source),
            "to": str(offer.target),
            "pages": len(offer.held.all_pages),
            "bytes": len(offer.held.all_pages) * sum(part.shape[0] * part.shape[2] for part in offer.held.source.parts),
            "age_s": round(now_s - offer.since_s, 3),
        }
        for offer in sorted(offers, key=lambda offer: offer.since_s)[:_MOST_OFFERS]
    ]


def _instance(fleet: Fleet, instance: Instance) -> dict[str, Any]:
    pool = instance.pool
    stats = pool.stats if instance.state != "lost" else []
    ranks = [
        {"rank": instance.first_rank + rank, "pid": each.pid, "host": each.host} for rank, each in pool.ranks.items()
    ]
    step_s, row_s, token_s = instance.steps.seconds_3.tolist()
    return {
        "name": str(instance),
        "role": instance.role,
        "state": instance.state,
        "since_s": instance.since_s,
        "ranks": ranks,
        "sequences": pool.num_sequences if instance.lives else 0,
        "tokens": sum(pool.router.num_tokens) if instance.lives else 0,
        "running": sum(each.num_running_now for each in stats),
        "waiting": sum(each.num_waiting_now for each in stats),
        "held": sum(each.num_held_now for each in stats),
        "arriving": sum(each.num_arriving_now for each in stats),
        "kv_pages": sum(each.kv_pages_total for each in stats),
        "kv_pages_used": sum(each.kv_pages_used_now for each in stats),
        "prefill_tokens_per_s": instance.rate.tokens_per_s,
        "predicted_step_s": {"step": step_s, "row": row_s, "token": token_s},
    }
