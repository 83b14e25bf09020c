"""eprt.instances/1: the instances of a server and what goes from one to another, for GET /v1/eprt/instances."""

from dataclasses import asdict
from typing import Any

from eprt.serve.instances.fleet import Fleet
from eprt.serve.instances.instance import Instance

SCHEMA = "eprt.instances/1"


def instances_document(fleet: Fleet) -> dict[str, Any]:
    document = {
        "schema": SCHEMA,
        "instances": [_instance(fleet, each) for each in fleet.instances.values()],
        "starting": [
            {"role": one.role, "name": one.name or None, "ranks": one.num_ranks}
            for one in (fleet.starter.pending if fleet.starter is not None else ())
        ],
        "instances_lost": fleet.num_lost,
        "handoffs": {"under_way": len(fleet.handoffs.offers), **asdict(fleet.handoffs.counts)},
    }
    return document if fleet.scale_document is None else {**document, "scale": fleet.scale_document()}


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
