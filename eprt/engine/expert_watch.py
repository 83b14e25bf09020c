"""What counts the load of a model's experts, and what moves them: made for the engine, which asks no layer itself."""

from dataclasses import dataclass

from eprt.config import EngineConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.migration.migrator import Migrator
from eprt.ep.migration.transports import make_transport
from eprt.ep.placement.batch_router import METHODS as ROUTING_METHODS
from eprt.ep.placement.batch_router import BatchRouter
from eprt.ep.placement.load import DeviceLoadRecorder, LoadRecorder
from eprt.models.model import Model


@dataclass(frozen=True)
class ExpertWatch:
    """One rank's."""

    recorder: LoadRecorder
    router: BatchRouter | None = None  # where config.replica_routing splits each batch
    migrator: Migrator | None = None  # where there is memory for experts on their way


def watch_experts(config: EngineConfig, group: EPGroup, model: Model) -> ExpertWatch:
    """Collective. Without MoE layers nothing is counted."""
    moe_layers = model.moe_layers()
    if not moe_layers:
        return ExpertWatch(LoadRecorder(0, 0, 0))
    moe = moe_layers[0].config
    shape = (len(moe_layers), moe.num_experts, moe.top_k)
    recorder = LoadRecorder(*shape)
    if model.device.type == "cuda":
        most_tokens, drafts = max(config.chunk_size, config.max_num_seqs), int(config.num_speculative_tokens > 0)
        recorder = DeviceLoadRecorder(*shape, most_tokens, model.device, drafts)
    router = None
    if config.replica_routing in ROUTING_METHODS:
        router = BatchRouter(group, moe.num_experts, ROUTING_METHODS[config.replica_routing])
    for row, layer in enumerate(moe_layers):
        layer.record_load(recorder, row)
        if router is not None:
            layer.route_by(router, row)
    if not config.spare_experts:
        return ExpertWatch(recorder, router)
    transport = make_transport(group, list({id(layer.pool): layer.pool for layer in moe_layers}.values()))
    routing = config.replica_routing, router
    return ExpertWatch(recorder, router, Migrator(group, moe_layers, transport, config.spare_experts, *routing))
