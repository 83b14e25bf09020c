// The row kernels, written once for vectors of kLanes floats. Each ep_rows_<isa>.cpp defines EPRT_LANES, includes this
// file and returns kKernels. Everything is in an anonymous namespace for the reason in isa.h.
#pragma once

#include <cstring>

#include "cpu/ep_rows.h"

namespace eprt::ep {
namespace {

constexpr int kLanes = EPRT_LANES;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Signs __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

template <class To, class From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
template <class Vector>
inline Vector load(const void* at) {
  Vector v;
  std::memcpy(&v, at, sizeof(v));
  return v;
}
template <class Vector>
inline void store(void* at, const Vector& v) {
  std::memcpy(at, &v, sizeof(v));
}
inline Words select(const Signs& condition, const Words& yes, const Words& no) {
  const Words mask = bits<Words>(condition);
  return (yes & mask) | (no & ~mask);
}

template <Dtype kDtype>
inline Floats load_floats(const void* row, int column) {
  if constexpr (kDtype == Dtype::kFloat32) {
    return load<Floats>(static_cast<const float*>(row) + column);
  } else {
    const Halves halves = load<Halves>(static_cast<const uint16_t*>(row) + column);
    return bits<Floats>(__builtin_convertvector(halves, Words) << 16);
  }
}

// Rounds to nearest even; every NaN becomes 0x7fc0, as in torch.
inline Halves to_bf16(const Floats& x) {
  const Words u = bits<Words>(x);
  const Words rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const Signs is_nan = bits<Signs>(u & 0x7fffffff) > 0x7f800000;
  return __builtin_convertvector(select(is_nan, Words{} + 0x7fc0, rounded), Halves);
}

template <Dtype kDtype>
inline void store_floats(void* row, int column, const Floats& x) {
  if constexpr (kDtype == Dtype::kFloat32) {
    store(static_cast<float*>(row) + column, x);
  } else {
    store(static_cast<uint16_t*>(row) + column, to_bf16(x));
  }
}

// e4m3fn of |x| <= 448, rounded to nearest even; NaN stays NaN. From 2^-6 on the value is normal: round away 20 of the
// 23 mantissa bits and change the exponent bias from 127 to 7. Below, e4m3 counts in steps of 2^-9, the unit in the
// last place of a float near 2^14: adding 2^14 makes the processor round.
inline Bytes to_e4m3(const Floats& x) {
  const Words u = bits<Words>(x), magnitude = u & 0x7fffffff;
  const Words normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3);
  const Words small = bits<Words>(bits<Floats>(magnitude) + 16384.0f) - 0x46800000;
  const Signs is_small = bits<Signs>(magnitude) < (127 - 6) << 23, is_nan = bits<Signs>(magnitude) > 0x7f800000;
  const Words value = select(is_nan, Words{} + 0x7f, select(is_small, small, normal));
  return __builtin_convertvector(value | ((u >> 24) & 0x80), Bytes);
}

// The end of a row whose length is not a multiple of the lanes is copied and padded with zeros.
template <Dtype kDtype>
inline Floats load_tail(const void* row, int column, int count) {
  alignas(64) char padded[sizeof(Floats)] = {};
  const size_t size = dtype_bytes(kDtype);
  std::memcpy(padded, static_cast<const char*>(row) + column * size, count * size);
  return load_floats<kDtype>(padded, 0);
}

template <Dtype kDtype>
float max_magnitude(const void* x, int begin, int end) {
  Words most = {};  // magnitudes of floats order like integers, and NaN is the largest
  for (int i = begin; i < end; i += kLanes) {
    const Floats v = i + kLanes <= end ? load_floats<kDtype>(x, i) : load_tail<kDtype>(x, i, end - i);
    const Words magnitude = bits<Words>(v) & 0x7fffffff;
    most = select(bits<Signs>(magnitude) > bits<Signs>(most), magnitude, most);
  }
  uint32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result = most[lane] > result ? most[lane] : result;
  return bits<float>(result);
}

template <Dtype kDtype>
void quantize_row(const void* x, int hidden, uint8_t* values, float* scales) {
  constexpr float kMaxE4m3 = 448.0f, kTiny = 1e-30f;  // kTiny keeps a group of zeros from dividing by zero
  for (int begin = 0, group = 0; begin < hidden; begin += kScaleGroup, ++group) {
    const int end = begin + kScaleGroup < hidden ? begin + kScaleGroup : hidden;
    float most = max_magnitude<kDtype>(x, begin, end);
    if (most < kTiny) most = kTiny;
    scales[group] = most / kMaxE4m3;
    const Floats inverse = Floats{} + kMaxE4m3 / most;
    int i = begin;
    for (; i + kLanes <= end; i += kLanes) store(values + i, to_e4m3(load_floats<kDtype>(x, i) * inverse));
    if (i < end) {
      const Bytes tail = to_e4m3(load_tail<kDtype>(x, i, end - i) * inverse);
      std::memcpy(values + i, &tail, end - i);
    }
  }
}

void quantize(const void* x, Dtype dtype, int hidden, uint8_t* values, float* scales) {
  if (dtype == Dtype::kFloat32) return quantize_row<Dtype::kFloat32>(x, hidden, values, scales);
  quantize_row<Dtype::kBFloat16>(x, hidden, values, scales);
}

inline Floats load_any(const Term& term, int column) {
  return term.dtype == Dtype::kFloat32 ? load_floats<Dtype::kFloat32>(term.row, column)
                                       : load_floats<Dtype::kBFloat16>(term.row, column);
}
inline Floats load_any_tail(const Term& term, int column, int count) {
  return term.dtype == Dtype::kFloat32 ? load_tail<Dtype::kFloat32>(term.row, column, count)
                                       : load_tail<Dtype::kBFloat16>(term.row, column, count);
}

template <Dtype kOut>
void sum_terms(const Term* terms, int num_terms, int hidden, void* out) {
  constexpr int kUnroll = 4;  // independent sums hide the latency of an addition
  int column = 0;
  for (; column + kUnroll * kLanes <= hidden; column += kUnroll * kLanes) {
    Floats sum[kUnroll] = {};
    for (int i = 0; i < num_terms; ++i) {
      for (int j = 0; j < kUnroll; ++j) {
        const Floats product = load_any(terms[i], column + j * kLanes) * terms[i].weight;
        sum[j] = sum[j] + product;
      }
    }
    for (int j = 0; j < kUnroll; ++j) store_floats<kOut>(out, column + j * kLanes, sum[j]);
  }
  for (; column < hidden; column += kLanes) {
    const int count = column + kLanes <= hidden ? kLanes : hidden - column;
    Floats sum = {};
    for (int i = 0; i < num_terms; ++i) {
      const Floats product = load_any_tail(terms[i], column, count) * terms[i].weight;
      sum = sum + product;
    }
    alignas(64) char tail[sizeof(Floats)];
    store_floats<kOut>(tail, 0, sum);
    const size_t size = dtype_bytes(kOut);
    std::memcpy(static_cast<char*>(out) + column * size, tail, count * size);
  }
}

void weighted_sum(const Term* terms, int num_terms, int hidden, void* out, Dtype out_dtype) {
  if (out_dtype == Dtype::kFloat32) return sum_terms<Dtype::kFloat32>(terms, num_terms, hidden, out);
  sum_terms<Dtype::kBFloat16>(terms, num_terms, hidden, out);
}

template <Dtype kDtype>
void add_rows(const void* a, const void* b, int hidden, void* out) {
  int column = 0;
  for (; column + kLanes <= hidden; column += kLanes) {
    store_floats<kDtype>(out, column, load_floats<kDtype>(a, column) + load_floats<kDtype>(b, column));
  }
  if (const int count = hidden - column; count > 0) {
    alignas(64) char tail[sizeof(Floats)];
    store_floats<kDtype>(tail, 0, load_tail<kDtype>(a, column, count) + load_tail<kDtype>(b, column, count));
    const size_t size = dtype_bytes(kDtype);
    std::memcpy(static_cast<char*>(out) + column * size, tail, count * size);
  }
}

void add(const void* a, const void* b, Dtype dtype, int hidden, void* out) {
  if (dtype == Dtype::kFloat32) return add_rows<Dtype::kFloat32>(a, b, hidden, out);
  add_rows<Dtype::kBFloat16>(a, b, hidden, out);
}

constexpr RowKernels kKernels{quantize, weighted_sum, add};

}  // namespace
}  // namespace eprt::ep
