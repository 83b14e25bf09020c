"""Operators: csrc/cpu computes them on CPU tensors, ops/cuda on GPU tensors. reference.py holds their slow oracles.

Knows tensors and their formats, nothing of layers, ranks or requests.
"""

from eprt.ops import (
    attention,
    checksum,
    choices,
    elementwise,
    entry_rows,
    indexer,
    paged_rows,
    replicas,
    rows,
    streams,
    token_mask,
    token_states,
    turned_rows,
)
from eprt.ops import decode_layer as decode_layers
from eprt.ops import gate as gates
from eprt.ops import group_linear as groups
from eprt.ops import linear as products
from eprt.ops import shared_attention as shared
from eprt.ops.by_device import by_device, gpu_only
from eprt.ops.weight import Weight, quantize_fp8, quantize_int8

add_checksum = by_device(checksum.add_checksum)
add_page_checksums = gpu_only("add_page_checksums")  # a CPU cache has its own (kv/pages.py)
add_rms_norm = by_device(elementwise.add_rms_norm)
add_rows = by_device(rows.add_rows)
as_cached = by_device(indexer.as_cached)
attend_decodes = decode_layers.attend_decodes  # on CPUs alone
cache_insert = by_device(attention.cache_insert)
choose_slots = by_device(replicas.choose_slots)
collapse_streams = by_device(streams.collapse_streams)
copy_rows = by_device(paged_rows.copy_rows)
count_choices = by_device(choices.count_choices)
expand_streams = by_device(streams.expand_streams)
# grouped_experts in two halves, so that other work can run between and beside them.
experts_up, experts_down = gpu_only("experts_up"), gpu_only("experts_down")
gate_slots = by_device(gates.gate_slots)
gate_topk = by_device(gates.gate_topk)
group_linear = by_device(groups.group_linear)
grouped_experts = by_device(products.grouped_experts)
index_insert = by_device(indexer.index_insert)
index_key_insert = by_device(indexer.index_key_insert)
index_queries = by_device(indexer.index_queries)
index_topk = by_device(indexer.index_topk)
insert_keys = by_device(entry_rows.insert_keys)
insert_rows = by_device(entry_rows.insert_rows)
insert_states = by_device(token_states.insert_states)
latent_insert = by_device(attention.latent_insert)
linear = by_device(products.linear)
mask_tokens = by_device(token_mask.mask_tokens)
mix_decodes = decode_layers.mix_decodes  # on CPUs alone
mix_streams = by_device(streams.mix_streams)
mla_chosen = by_device(indexer.mla_chosen)
mla_decode = by_device(attention.mla_decode)
mla_extend = by_device(attention.mla_extend)
norm_insert = by_device(attention.norm_insert)
norm_linear = by_device(products.norm_linear)
place_rows = by_device(rows.place_rows)
pool_entries = by_device(shared.pool_entries)
rms_norm = by_device(elementwise.rms_norm)
rope = by_device(elementwise.rope)
shared_attention = by_device(shared.shared_attention)
silu_linear = by_device(products.silu_linear)
silu_mul = by_device(elementwise.silu_mul)
sum_rows = by_device(rows.sum_rows)
turn_rows = by_device(turned_rows.turn_rows)
turned_attention = by_device(shared.turned_attention)
turned_queries = by_device(entry_rows.turned_queries)
