#include "cpu/rowwise.h"

#include "cpu/buffer.h"
#include "cpu/isa.h"

namespace eprt {
namespace {

int64_t first_outside(const int64_t* index, int64_t n, int64_t limit) {
  for (int64_t i = 0; i < n; ++i) {
    if (index[i] < 0 || index[i] >= limit) return i;
  }
  return -1;
}

}  // namespace

void rms_norm(const RmsNormArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::rms_norm(args);
    case Isa::kAvx2:
      return avx2::rms_norm(args);
    default:
      return avx512::rms_norm(args);
  }
}

void silu_mul(const SiluMulArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::silu_mul(args);
    case Isa::kAvx2:
      return avx2::silu_mul(args);
    default:
      return avx512::silu_mul(args);
  }
}

int64_t rope(const RopeArgs& args) {
  const int64_t bad = first_outside(args.position, args.rows, args.num_positions);
  if (bad >= 0) return bad;
  switch (cpu_isa()) {
    case Isa::kScalar:
      scalar::rope(args);
      break;
    case Isa::kAvx2:
      avx2::rope(args);
      break;
    default:
      avx512::rope(args);
  }
  return -1;
}

int64_t cache_insert(const CacheInsertArgs& args) {
  const int64_t bad = first_outside(args.slot, args.rows, args.num_pages * args.page_size);
  if (bad >= 0) return bad;
  switch (cpu_isa()) {
    case Isa::kScalar:
      scalar::cache_insert(args);
      break;
    case Isa::kAvx2:
      avx2::cache_insert(args);
      break;
    default:
      avx512::cache_insert(args);
  }
  return -1;
}

int64_t latent_insert(const LatentInsertArgs& args) {
  CacheInsertArgs entry = args.entry;
  const int64_t rows = entry.rows, latent = args.latent_size, key = entry.size - latent;
  const int64_t bad_slot = first_outside(entry.slot, rows, entry.num_pages * entry.page_size);
  const int64_t bad_position = first_outside(args.position, rows, args.num_positions);
  if (bad_slot >= 0 || bad_position >= 0) return bad_slot >= 0 ? bad_slot : rows + bad_position;

  const int64_t value_bytes = entry.kv_type == Dtype::kFloat32 ? 4 : 2;
  Buffer<char> made(rows * entry.size * value_bytes);
  char *latents = made.get(), *keys = latents + rows * latent * value_bytes;
  rms_norm({.x = entry.kv,
            .x_row = entry.kv_row,
            .residual = nullptr,
            .residual_row = 0,
            .weight = args.weight,
            .weight_type = args.weight_type,
            .sum = nullptr,
            .out = latents,
            .type = entry.kv_type,
            .rows = rows,
            .size = latent,
            .eps = args.eps,
            .num_threads = entry.num_threads});
  rope({.x = static_cast<const char*>(entry.kv) + latent * value_bytes,
        .x_row = entry.kv_row,
        .x_head = key,
        .cos_sin = args.cos_sin,
        .position = args.position,
        .out = keys,
        .type = entry.kv_type,
        .rows = rows,
        .heads = 1,
        .size = key,
        .num_positions = args.num_positions,
        .interleaved = args.interleaved,
        .num_threads = entry.num_threads});

  entry.kv = latents, entry.kv_row = entry.size = latent;
  cache_insert(entry);
  entry.pages = static_cast<char*>(entry.pages) + latent * (entry.page_type == Dtype::kFloat32 ? 4 : 2);
  entry.kv = keys, entry.kv_row = entry.size = key;
  cache_insert(entry);
  return -1;
}

}  // namespace eprt
