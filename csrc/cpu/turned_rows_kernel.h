// Norm and rotation of rows (turned_rows.h), written once against Vec and included once per instruction set.
#pragma once

#include "cpu/buffer.h"
#include "cpu/lane_loop.h"
#include "cpu/team.h"
#include "cpu/turned_rows.h"

namespace eprt {
namespace {

template <class T, class Out>
class TurnedRows {
 public:
  explicit TurnedRows(const TurnedRowsArgs& args) : args_(args) {}

  void run() const {
    const int64_t scratch_size = round_up(2 * args_.turned + args_.size, 16);
    Buffer<float> scratch(args_.num_threads * scratch_size);
    parallel_for(args_.rows, threads_for(args_.num_threads, args_.rows * args_.heads * args_.size),
                 [&](int64_t r, int thread) { turn_row(r, scratch.get() + thread * scratch_size); });
  }

 private:
  void turn_row(int64_t r, float* cos) const {
    const int64_t half = args_.turned / 2;
    const float* cos_sin = args_.cos_sin + args_.position[r] * args_.turned;
    const float sign = args_.reversed ? -1.0f : 1.0f;
    float* sin = cos + args_.turned;
    for (int64_t i = 0; i < half; ++i) {
      cos[2 * i] = cos[2 * i + 1] = cos_sin[i];
      sin[2 * i + 1] = sign * cos_sin[half + i];
      sin[2 * i] = -sin[2 * i + 1];
    }
    T* normed = reinterpret_cast<T*>(sin + args_.turned);
    for (int64_t h = 0; h < args_.heads; ++h) {
      const T* x = static_cast<const T*>(args_.x) + r * args_.x_row + h * args_.x_head;
      if (args_.is_normed) x = norm(x, normed);
      turn(x, cos, sin, static_cast<Out*>(args_.out) + (r * args_.heads + h) * args_.size);
    }
  }

  const T* norm(const T* x, T* out) const {
    Vec squares = zero();
    for_lanes(args_.size, [&](int64_t i, auto load_i, auto) {
      const Vec x_i = load_i(x + i);
      squares = fma(x_i, x_i, squares);
    });
    const float mean = reduce_add(squares) / static_cast<float>(args_.size);
    const Vec factor = set1(1.0f / __builtin_sqrtf(mean + args_.eps));
    if (args_.weight == nullptr) {
      for_lanes(args_.size, [&](int64_t i, auto load_i, auto store_i) { store_i(out + i, load_i(x + i) * factor); });
    } else if (args_.weight_type == Dtype::kFloat32) {
      weigh(x, factor, static_cast<const float*>(args_.weight), out);
    } else {
      weigh(x, factor, static_cast<const bf16*>(args_.weight), out);
    }
    return out;
  }

  template <class W>
  void weigh(const T* x, Vec factor, const W* weight, T* out) const {
    for_lanes(args_.size, [&](int64_t i, auto load_i, auto store_i) {
      store_i(out + i, load_i(x + i) * factor * load_i(weight + i));
    });
  }

  void turn(const T* x, const float* cos, const float* sin, Out* out) const {
    const int64_t begin = args_.size - args_.turned;
    convert(x, begin, out);
    for_lanes(args_.turned, [&](int64_t i, auto load_i, auto store_i) {
      const Vec x_i = load_i(x + begin + i);
      store_i(out + begin + i, fma(x_i, load_i(cos + i), swap_pairs(x_i) * load_i(sin + i)));
    });
  }

  const TurnedRowsArgs& args_;
};

inline void turned_rows_any(const TurnedRowsArgs& args) {
  const bool wide = args.out_type == Dtype::kFloat32;
  if (args.type == Dtype::kFloat32) {
    return wide ? TurnedRows<float, float>(args).run() : TurnedRows<float, bf16>(args).run();
  }
  wide ? TurnedRows<bf16, float>(args).run() : TurnedRows<bf16, bf16>(args).run();
}

}  // namespace
}  // namespace eprt
