"""The indexer's rows and the norm of query latents in one kernel each, against the chains of the CPU's operators."""

import torch

from eprt import ops
from eprt.ops import cuda
from eprt.ops.elementwise import Rotation
from eprt.ops.index_format import IndexFormat
from eprt.ops.kv_format import KVFormat
from tests.gpu.draw import ROUNDING, Draw, cpu, near

# Values of a head, of them rotated.
SIZES = ((128, 64), (16, 8), (32, 32), (4, 2))
# Of rows and of the cache.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.float32, torch.uint8),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.uint8),
)


def queries(draw: Draw) -> None:
    """Heads that fill a program, some, and one more; rows that lie in a wider product."""
    for size, turning in SIZES:
        for heads in (1, 64, 65):
            for dtype, cache in DTYPES:
                rotation = draw.rotation(turning, 3, False)
                query = draw.normal(3, heads + 1, size, dtype=dtype)[:, :heads]
                got = cuda.index_queries(query, rotation, cache)
                want = ops.index_queries(query.cpu(), _on_cpu(rotation), cache)
                near(got, want, ROUNDING[dtype], f"queries {size} {turning} {heads} {dtype} {cache}")
    assert cuda.index_queries(draw.normal(0, 4, 16), draw.rotation(8, 0, False), torch.uint8).shape == (0, 4, 16)


def inserted_keys(draw: Draw) -> None:
    """Other entries stay as they were; a key far from zero keeps its digits."""
    for size, turning in SIZES:
        for dtype, cache in DTYPES:
            entry, rotation = IndexFormat(size, cache), draw.rotation(turning, 3, False)
            key, slots = draw.normal(3, size + 5, dtype=dtype)[:, :size], torch.tensor([7, 0, 19], device=draw.device)
            key[1] += 30
            norm, bias = draw.normal(size), draw.normal(size)
            pages = torch.zeros(5, 4, entry.width, dtype=cache, device=draw.device)
            cuda.index_key_insert(pages, slots, key, norm, bias, 1e-6, rotation)
            want = torch.zeros(5, 4, entry.width, dtype=cache)
            k, s, n, b = cpu(key, slots, norm, bias)
            ops.index_key_insert(want, s, k, n, b, 1e-6, _on_cpu(rotation))
            got, want = (entry.decode(pages.cpu().view(20, -1)) for pages in (pages, want))
            rounding = (
                0.02 if cache == torch.uint8 else 2 * ROUNDING[dtype]
            )  # a value in e4m3 may fall to its neighbour
            near(got[[7, 0, 19]], want[[7, 0, 19]], rounding, f"keys {size} {turning} {dtype} {cache}")
            assert not got[[1, 6, 18]].any()


def norms_beside_entries(draw: Draw) -> None:
    """As both operators alone; float32 in sums of another order."""
    for latent, rope, width, dtype, cache in (
        (512, 64, 1536, torch.bfloat16, torch.bfloat16),
        (512, 64, 1536, torch.bfloat16, torch.uint8),
        (32, 8, 48, torch.float32, torch.float32),
        (32, 8, 3, torch.bfloat16, torch.uint8),
    ):
        for interleaved in (True, False):
            joined = draw.normal(3, width + latent + rope, dtype=dtype)
            q, kv = joined.split([width, latent + rope], dim=1)
            slots, entry = torch.tensor([7, 0, 19], device=draw.device), KVFormat(latent, rope, cache)
            alone, together = (torch.zeros(5, 4, entry.width, dtype=cache, device=draw.device) for _ in range(2))
            q_weight, weight = draw.normal(width, dtype=dtype), draw.normal(latent, dtype=dtype)
            how = slots, kv, weight, 1e-6, draw.rotation(rope, 3, interleaved)
            got = cuda.norm_insert(q, q_weight, 1e-5, together, *how)
            cuda.latent_insert(alone, *how)
            decoded = (entry.decode(pages.cpu().view(20, -1)) for pages in (together, alone))
            tolerance = 1e-6 if dtype == torch.float32 else 0.0
            near(got, cuda.rms_norm(q, q_weight, 1e-5), tolerance, f"norms {latent} {cache}")
            near(*decoded, tolerance, f"entries {latent} {cache}")


def _on_cpu(rotation: Rotation) -> Rotation:
    return Rotation(*cpu(rotation.cos_sin_PR, rotation.position_T), rotation.interleaved)


ALL = (queries, inserted_keys, norms_beside_entries)
