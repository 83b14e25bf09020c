"""The operators on GPU tensors, in Triton and cuBLAS. Names and signatures are those of eprt.ops; see docs/gpu.md.

Nothing here waits for the GPU, and no launch depends on values that lie there, so every operator may be captured in a
CUDA graph. Values are therefore not checked: slots, pages, positions and counts must be valid.
"""

from eprt.ops.cuda.attention import mla_decode, mla_extend
from eprt.ops.cuda.cache import cache_insert, latent_insert
from eprt.ops.cuda.checksum import add_checksum
from eprt.ops.cuda.choices import count_choices
from eprt.ops.cuda.entry_pool import pool_entries
from eprt.ops.cuda.entry_store import encode_entries, insert_rows
from eprt.ops.cuda.experts import experts_down, experts_up, grouped_experts
from eprt.ops.cuda.gate import gate_slots, gate_topk
from eprt.ops.cuda.group_linear import group_linear
from eprt.ops.cuda.index_keys import as_cached, encode_keys, insert_keys, turned_queries
from eprt.ops.cuda.index_rows import index_key_insert, index_queries
from eprt.ops.cuda.indexer import index_insert, index_topk, mla_chosen
from eprt.ops.cuda.linear import linear, norm_linear, silu_linear
from eprt.ops.cuda.norm import add_rms_norm, rms_norm
from eprt.ops.cuda.norm_insert import norm_insert
from eprt.ops.cuda.page_checksums import add_page_checksums
from eprt.ops.cuda.paged_rows import copy_rows
from eprt.ops.cuda.replicas import choose_slots
from eprt.ops.cuda.rope import rope
from eprt.ops.cuda.rows import add_rows, place_rows, sum_rows
from eprt.ops.cuda.shared_attention import shared_attention, turned_attention
from eprt.ops.cuda.silu import silu_mul
from eprt.ops.cuda.streams import collapse_streams, expand_streams, mix_streams
from eprt.ops.cuda.token_mask import mask_tokens
from eprt.ops.cuda.token_states import insert_states
from eprt.ops.cuda.turned_rows import turn_rows
