// Row-wise operators, written once against Vec and included once per instruction set. Each row is computed alone.
#pragma once

#include "cpu/buffer.h"
#include "cpu/lane_loop.h"
#include "cpu/rowwise.h"
#include "cpu/team.h"

namespace eprt {
namespace {

template <class T, class W>
void rms_norm_rows(const RmsNormArgs& args) {
  parallel_for(args.rows, threads_for(args.num_threads, args.rows * args.size), [&](int64_t r) {
    const T* x = static_cast<const T*>(args.x) + r * args.x_row;
    const W* weight = static_cast<const W*>(args.weight);
    if (args.residual) {
      const T* residual = static_cast<const T*>(args.residual) + r * args.residual_row;
      T* sum = static_cast<T*>(args.sum) + r * args.size;
      for_lanes(args.size,
                [&](int64_t i, auto load_i, auto store_i) { store_i(sum + i, load_i(x + i) + load_i(residual + i)); });
      x = sum;  // the norm sees the sum rounded to T, as without fusion
    }
    Vec squares = zero();
    for_lanes(args.size, [&](int64_t i, auto load_i, auto) {
      const Vec x_i = load_i(x + i);
      squares = fma(x_i, x_i, squares);
    });
    const float mean = reduce_add(squares) / static_cast<float>(args.size);
    const Vec factor = set1(1.0f / __builtin_sqrtf(mean + args.eps));
    T* out = static_cast<T*>(args.out) + r * args.size;
    for_lanes(args.size, [&](int64_t i, auto load_i, auto store_i) {
      store_i(out + i, load_i(x + i) * factor * load_i(weight + i));
    });
  });
}

template <class T>
void silu_mul_rows(const SiluMulArgs& args) {
  const Vec limit = set1(args.limit);
  parallel_for(args.rows, threads_for(args.num_threads, args.rows * args.size), [&](int64_t r) {
    const T* gate = static_cast<const T*>(args.x) + r * args.x_row;
    const T* up = gate + args.size;
    T* out = static_cast<T*>(args.out) + r * args.size;
    for_lanes(args.size, [&](int64_t i, auto load_i, auto store_i) {
      // Negated, so that a NaN stays one: the maximum of both is its second operand then.
      const Vec g = zero() - max(zero() - limit, zero() - load_i(gate + i));
      const Vec u = max(zero() - limit, zero() - max(zero() - limit, zero() - load_i(up + i)));
      const Vec sigmoid = set1(1.0f) / (set1(1.0f) + exp2(g * set1(-kLog2E)));
      store_i(out + i, g * sigmoid * u);
    });
  });
}

// out = x * cos + partner(x) * sin. Each row's cosines and signed sines are laid out once for all heads.
template <class T>
void rope_rows(const RopeArgs& args) {
  const int64_t half = args.size / 2;
  const int64_t table_size = round_up(2 * args.size, 16);
  Buffer<float> tables(args.num_threads * table_size);
  parallel_for(args.rows, threads_for(args.num_threads, args.rows * args.heads * args.size),
               [&](int64_t r, int thread) {
                 float* cos = tables.get() + thread * table_size;
                 float* sin = cos + args.size;
                 const float* cos_sin = args.cos_sin + args.position[r] * args.size;
                 for (int64_t i = 0; i < half; ++i) {
                   const int64_t low = args.interleaved ? 2 * i : i, high = args.interleaved ? low + 1 : i + half;
                   cos[low] = cos[high] = cos_sin[i];
                   sin[high] = cos_sin[half + i];
                   sin[low] = -sin[high];
                 }
                 for (int64_t h = 0; h < args.heads; ++h) {
                   const T* x = static_cast<const T*>(args.x) + r * args.x_row + h * args.x_head;
                   T* out = static_cast<T*>(args.out) + (r * args.heads + h) * args.size;
                   const auto rotate = [&](int64_t begin, int64_t n, auto partner) {
                     for_lanes(n, [&](int64_t i, auto load_i, auto store_i) {
                       i += begin;
                       store_i(out + i, fma(load_i(x + i), load_i(cos + i), partner(i, load_i) * load_i(sin + i)));
                     });
                   };
                   if (args.interleaved) {
                     rotate(0, args.size, [&](int64_t i, auto load_i) { return swap_pairs(load_i(x + i)); });
                   } else {
                     rotate(0, half, [&](int64_t i, auto load_i) { return load_i(x + half + i); });
                     rotate(half, half, [&](int64_t i, auto load_i) { return load_i(x + i - half); });
                   }
                 }
               });
}

template <class T>
void cache_insert_rows(const CacheInsertArgs& args) {
  parallel_for(args.rows, threads_for(args.num_threads, args.rows * args.size), [&](int64_t r) {
    const int64_t page = args.slot[r] / args.page_size, offset = args.slot[r] % args.page_size;
    T* out = static_cast<T*>(args.pages) + page * args.page_stride + offset * args.row_stride;
    convert(element(args.kv, args.kv_type, r * args.kv_row), args.kv_type, args.size, out);
  });
}

inline void rms_norm_any(const RmsNormArgs& args) {
  const bool weight32 = args.weight_type == Dtype::kFloat32;
  if (args.type == Dtype::kFloat32) {
    return weight32 ? rms_norm_rows<float, float>(args) : rms_norm_rows<float, bf16>(args);
  }
  weight32 ? rms_norm_rows<bf16, float>(args) : rms_norm_rows<bf16, bf16>(args);
}
inline void silu_mul_any(const SiluMulArgs& args) {
  args.type == Dtype::kFloat32 ? silu_mul_rows<float>(args) : silu_mul_rows<bf16>(args);
}
inline void rope_any(const RopeArgs& args) {
  args.type == Dtype::kFloat32 ? rope_rows<float>(args) : rope_rows<bf16>(args);
}
inline void cache_insert_any(const CacheInsertArgs& args) {
  args.page_type == Dtype::kFloat32 ? cache_insert_rows<float>(args) : cache_insert_rows<bf16>(args);
}

}  // namespace
}  // namespace eprt
