"""How a rank's process gets its engine: bound to its cores, with its part of the model.

Knows nothing of requests.
"""

import contextlib
import gc
import logging
from dataclasses import replace

import eprt
from eprt.bind import Binding, bind, far_memory
from eprt.serve.fingerprint import fingerprint
from eprt.serve.options import OptionError, ServeOptions
from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.channel import Channel
from eprt.serve.ranks.loading import loading_messages, loading_progress
from eprt.serve.ranks.usage_meter import gpu_name

_log = logging.getLogger(__name__)


def wait_admitted(channel: Channel) -> None:
    """A rank that joins may touch its slot's memory once the others have left the lost rank's last view."""
    while True:
        for message in channel.receive(None):
            if isinstance(message, msg.Refused):
                raise OptionError(message.message)
            if isinstance(message, msg.Admit):
                return


def load(options: ServeOptions, group, channel: Channel, first_rank: int = 0):
    """This rank's engine, ready to step; tell_ready() is to follow. Collective, but for a rank that joins. Rank 0 shows
    its progress. first_rank: ranks of this host that are in other instances, before this one's."""
    config, place = options.engine, first_rank + group.rank
    binding = bind(options.bind, lambda me: _sharers(me, group, place))
    # Where ranks have memory of their own, it is worth a line for each.
    level = logging.INFO if group.rank == 0 or binding.nodes else logging.DEBUG
    _log.log(level, "[rank %d/%d] %s", group.rank, group.size, binding)
    if binding.warning and group.rank == 0:
        _log.warning("%s", binding.warning)
    from eprt.engine.engine import Engine
    from eprt.engine.memory_plan import tell_memory

    # The frontend's router alone limits the queue: between two steps the engine may see more requests waiting than
    # max_queue, because those that it will admit in its next step still count as waiting.
    # Where ranks may be lost, any of them may be given the requests of the others.
    num_ranks = group.size if options.max_lost_ranks else 1
    if options.num_instances:
        num_ranks = group.num_ranks_on_host
    config = replace(config, max_queue=num_ranks * (config.max_queue + config.max_num_seqs))
    tell_memory(config, group)
    with loading_progress() if group.rank == 0 else contextlib.nullcontext() as show:
        engine = Engine(config, group, progress=loading_messages(channel.send, show))
    if config.device == "cpu":
        _tell_far_memory(binding, group)
    if options.max_lost_ranks:
        engine.membership.require_changeable()
    if options.join_address is not None:
        engine.handoff.require_cache().open_to_hosts(channel.own_host or options.join_address[0], options.page_reader)
    # Objects made by loading live as long as the process: the collector need not visit them again.
    gc.collect()
    gc.freeze()
    return engine


def tell_ready(engine, channel: Channel) -> None:
    channel.send(msg.Ready(_info(engine)))
    channel.send(msg.StepReport([], engine.stats()))


def _tell_far_memory(binding: Binding, group) -> None:
    """On which NUMA nodes the weights have come to lie: memory is preferred on the rank's own, not forced there."""
    text, is_far = far_memory(binding.nodes) if binding.nodes else ("", False)
    if text:
        _log.log(logging.WARNING if is_far else logging.INFO, "[rank %d/%d] memory: %s", group.rank, group.size, text)


def _sharers(me: tuple[str, int, list[int]], group, place: int) -> list[tuple[str, int, list[int]]]:
    """Who shares this host's cores, by host, process and CPUs; ranks of other instances stand as processes below 0.
    place: of this rank among them."""
    num_others = group.num_ranks_on_host - group.size
    if num_others <= 0:
        return group.allgather(me)
    host, _, cpus = me
    return [me if i == place else (host, -1 - i, cpus) for i in range(group.num_ranks_on_host)]


def _terms(engine) -> msg.HandoffTerms | None:
    source, config = engine.handoff.source, engine.config
    if source is None:
        return None
    parts = ", ".join(f"{part.shape[0]} layers of {part.shape[2]} B a page" for part in source.parts)
    return msg.HandoffTerms(
        model=fingerprint(config.model_dir),
        page_size=config.page_size,
        cache_format=f"{config.kv_cache_dtype} ({engine.model.kv_dtype}): {parts}",
        drafts=config.num_speculative_tokens,
        version=eprt.__version__,
    )


def _info(engine) -> msg.EngineInfo:
    model = engine.model
    moe_layers = model.moe_layers()
    return msg.EngineInfo(
        vocab_size=engine.limits.vocab_size,
        max_model_len=engine.limits.max_model_len,
        kv_tokens=engine.limits.kv_tokens,
        node_of_rank=engine.group.node_of_rank,
        num_experts=model.config.moe.num_experts if model.config.moe else 0,
        moe_layers=tuple(model.moe_layer_indices()),
        expert_of_slot=[list(layer.expert_of_slot) for layer in moe_layers],
        spare_experts=engine.config.spare_experts,
        expert_bytes=max((layer.pool.expert_bytes for layer in moe_layers), default=0),
        terms=_terms(engine),
        gpu=gpu_name(engine),
        page_owner="" if engine.handoff.source is None else engine.handoff.source.owner,
    )
