"""The executor: takes one microbatch, or two that take turns, through the layers by the schedules of schedules.py."""

from collections.abc import Generator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from eprt.layers.batch import ForwardBatch
from eprt.layers.lanes import Lanes
from eprt.layers.layer_step import Layer, LayerStep, Microbatch
from eprt.layers.moe import EPMoE
from eprt.layers.moe_step import MoEStep
from eprt.layers.schedules import (
    ALONE,
    DENSE,
    IN_TURN,
    PAUSE,
    PLAIN,
    SINGLE_BATCH,
    SINGLE_BATCH_TILES,
    TWO_BATCH,
    Stage,
)
from eprt.layers.sm_split import device_sms, send_sms, tile_rows
from eprt.ops.decode_layer import DecodeExperts


def run_layers(
    layers: Sequence[Layer], x_TH: Tensor, batch: ForwardBatch, cache_L: Sequence[Any], lanes: Lanes
) -> Tensor:
    """The residual stream behind the layers. Two microbatches if batch.overlap is "tbo", else one."""
    microbatches = [Microbatch(batch, x_TH)]
    if batch.overlap == "tbo":
        first, second = batch.halves()
        at = first.num_tokens
        microbatches = [Microbatch(first, x_TH[:at], 0), Microbatch(second, x_TH[at:], 1)]
    for _ in zip_longest(*(_walk(layers, microbatch, cache_L, lanes) for microbatch in microbatches)):
        pass
    results = [microbatch.x_TH for microbatch in microbatches]
    return results[0] if len(results) == 1 else torch.cat(results)


def _walk(
    layers: Sequence[Layer], microbatch: Microbatch, cache_L: Sequence[Any], lanes: Lanes
) -> Generator[None, None, None]:
    """Takes one microbatch through all layers; yields at every PAUSE."""
    for layer, cache in zip(layers, cache_L, strict=True):
        step, schedule = begin_step(layer, microbatch, cache)
        for stage in schedule:
            if stage is PAUSE:
                yield
            else:
                lanes.run(stage, step)


def begin_step(layer: Layer, microbatch: Microbatch, cache: Any) -> tuple[LayerStep, tuple[Stage, ...]]:
    """A microbatch at the beginning of a layer, and the schedule that it follows there."""
    moe, overlap = layer.mlp, microbatch.batch.overlap
    if not isinstance(moe, EPMoE):
        return LayerStep(layer, microbatch, cache), DENSE
    if overlap == "tbo":
        return MoEStep(layer, moe, microbatch, cache), TWO_BATCH
    if overlap == "none":
        if (decode_experts := _decode_experts(moe, microbatch.batch)) is not None:
            return MoEStep(layer, moe, microbatch, cache, decode_experts=decode_experts), ALONE
        schedule = PLAIN if moe.ep[microbatch.batch.mode].sends_in_background() else IN_TURN
        return MoEStep(layer, moe, microbatch, cache), schedule
    signal = _tile_signal(moe, microbatch.batch) if cache.is_cuda else None
    step = MoEStep(layer, moe, microbatch, cache, signal)
    return step, SINGLE_BATCH if signal is None else SINGLE_BATCH_TILES


def _decode_experts(moe: EPMoE, batch: ForwardBatch) -> DecodeExperts | None:
    """For one operator in place of all from gate to combine; None where there are others, or more than decodes."""
    if batch.num_decode < batch.num_tokens or not moe.ep[batch.mode].is_alone():
        return None
    return moe.for_decodes(batch.num_tokens)


def _tile_signal(moe: EPMoE, batch: ForwardBatch) -> Any:
    """For outputs that leave tile by tile; None where they leave when all are there."""
    T, num_ranks, num_slots = batch.num_tokens, moe.group.size, len(moe.expert_of_slot)
    num_sms = batch.overlap_sms
    if num_sms is None:
        num_sms = send_sms(moe.config, T, num_ranks, num_slots, device_sms())
    if num_sms == 0:
        return None
    return moe.ep[batch.mode].new_signal(tile_rows(moe.config, T, num_ranks, num_slots * num_ranks), num_sms)
