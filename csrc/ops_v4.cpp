// The operators of DeepSeek V4; see ops.cpp. eprt/ops/streams.py and shared_attention.py check shapes and dtypes.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "cpu/entry_fp8.h"
#include "cpu/paged_rows.h"
#include "cpu/shared_attention.h"
#include "cpu/streams.h"
#include "cpu/turned_rows.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

using OptionalTensor = std::optional<Tensor>;

eprt::Dtype dtype_of(const Tensor& t) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, "expected float32 or bfloat16");
  return type == ScalarType::Float ? eprt::Dtype::kFloat32 : eprt::Dtype::kBFloat16;
}

template <class T>
const T* data_of(const Tensor& t) {
  return static_cast<const T*>(t.data_ptr());
}

void stream_mix(Tensor x_TMH, Tensor fn_KW, Tensor base_K, Tensor scale, double eps, double norm_eps,
                int64_t iterations, Tensor row_TH, OptionalTensor mixed_TMH, OptionalTensor post_TM,
                int64_t num_threads) {
  const eprt::StreamMixArgs args{.x = x_TMH.data_ptr(),
                                 .type = dtype_of(x_TMH),
                                 .fn = data_of<float>(fn_KW),
                                 .base = data_of<float>(base_K),
                                 .scale = data_of<float>(scale),
                                 .row = row_TH.data_ptr(),
                                 .mixed = mixed_TMH ? static_cast<float*>(mixed_TMH->data_ptr()) : nullptr,
                                 .post = post_TM ? static_cast<float*>(post_TM->data_ptr()) : nullptr,
                                 .rows = x_TMH.size(0),
                                 .streams = x_TMH.size(1),
                                 .size = x_TMH.size(2),
                                 .iterations = iterations,
                                 .eps = static_cast<float>(eps),
                                 .norm_eps = static_cast<float>(norm_eps),
                                 .num_threads = static_cast<int>(num_threads)};
  STD_TORCH_CHECK(args.streams <= eprt::kMaxStreams && fn_KW.size(0) == args.outputs(), "stream_mix: shapes differ");
  eprt::stream_mix(args);
}

void stream_expand(Tensor mixed_TMH, Tensor post_TM, Tensor y_TH, Tensor out_TMH, int64_t num_threads) {
  eprt::stream_expand({.mixed = data_of<float>(mixed_TMH),
                       .post = data_of<float>(post_TM),
                       .y = y_TH.data_ptr(),
                       .out = out_TMH.data_ptr(),
                       .type = dtype_of(y_TH),
                       .rows = mixed_TMH.size(0),
                       .streams = mixed_TMH.size(1),
                       .size = mixed_TMH.size(2),
                       .num_threads = static_cast<int>(num_threads)});
}

int64_t shared_attention(Tensor query_TND, Tensor local_XD, Tensor local_begin_T, Tensor local_end_T,
                         Tensor entries_PED, Tensor table_BP, Tensor request_T, Tensor num_entries_T,
                         OptionalTensor slot_TK, Tensor sink_N, double scale, int64_t rope_size, Tensor out_TND,
                         int64_t num_threads) {
  const bool is_fp8 = entries_PED.scalar_type() == ScalarType::Byte;
  const eprt::SharedAttentionArgs args{.query = query_TND.data_ptr(),
                                       .local = local_XD.data_ptr(),
                                       .type = dtype_of(query_TND),
                                       .local_begin = data_of<int64_t>(local_begin_T),
                                       .local_end = data_of<int64_t>(local_end_T),
                                       .entries = entries_PED.data_ptr(),
                                       .entry_type = is_fp8 ? eprt::Dtype::kFp8E4M3 : dtype_of(entries_PED),
                                       .entry_size = entries_PED.size(2),
                                       .rope = rope_size,
                                       .entry_page = entries_PED.stride(0),
                                       .num_pages = entries_PED.size(0),
                                       .page_entries = entries_PED.size(1),
                                       .table = data_of<int64_t>(table_BP),
                                       .num_requests = table_BP.size(0),
                                       .table_width = table_BP.size(1),
                                       .request = data_of<int32_t>(request_T),
                                       .num_entries = data_of<int32_t>(num_entries_T),
                                       .slot = slot_TK ? data_of<int32_t>(*slot_TK) : nullptr,
                                       .slot_width = slot_TK ? slot_TK->size(1) : 0,
                                       .sink = data_of<float>(sink_N),
                                       .out = static_cast<float*>(out_TND.data_ptr()),
                                       .rows = query_TND.size(0),
                                       .heads = query_TND.size(1),
                                       .size = query_TND.size(2),
                                       .num_local = local_XD.size(0),
                                       .scale = static_cast<float>(scale),
                                       .num_threads = static_cast<int>(num_threads)};
  const int64_t bad = eprt::shared_attention_first_bad_row(args);
  if (bad < 0) eprt::shared_attention(args);
  return bad;
}

void entries_to_fp8(Tensor values_XD, int64_t rope_size, Tensor entries_XW) {
  const eprt::EntryFp8 format{values_XD.size(1), rope_size};
  STD_TORCH_CHECK(format.scale_at() + format.scales() <= entries_XW.size(1), "entries_to_fp8: no room");
  eprt::entries_to_fp8(format, values_XD.data_ptr(), dtype_of(values_XD), values_XD.size(0),
                       static_cast<uint8_t*>(entries_XW.data_ptr()), entries_XW.size(1));
}

int64_t pool_entries(Tensor state_S2C, Tensor index_XR, int64_t first_slots, Tensor out_XD, int64_t num_threads) {
  const eprt::PoolArgs args{.state = data_of<float>(state_S2C),
                            .index = data_of<int64_t>(index_XR),
                            .out = static_cast<float*>(out_XD.data_ptr()),
                            .num_states = state_S2C.size(0),
                            .channels = state_S2C.size(2),
                            .rows = index_XR.size(0),
                            .slots = index_XR.size(1),
                            .size = out_XD.size(1),
                            .first_slots = first_slots,
                            .num_threads = static_cast<int>(num_threads)};
  const int64_t bad = eprt::pool_first_bad_row(args);
  if (bad < 0) eprt::pool_entries(args);
  return bad;
}

int64_t turned_rows(Tensor x_TND, bool is_normed, OptionalTensor weight_D, double eps, Tensor cos_sin_PR,
                    Tensor position_T, bool reversed, Tensor out_TND, int64_t num_threads) {
  return eprt::turned_rows({.x = x_TND.data_ptr(),
                            .type = dtype_of(x_TND),
                            .x_row = x_TND.stride(0),
                            .x_head = x_TND.stride(1),
                            .is_normed = is_normed,
                            .eps = static_cast<float>(eps),
                            .weight = weight_D ? weight_D->data_ptr() : nullptr,
                            .weight_type = weight_D ? dtype_of(*weight_D) : eprt::Dtype::kFloat32,
                            .cos_sin = data_of<float>(cos_sin_PR),
                            .position = data_of<int64_t>(position_T),
                            .reversed = reversed,
                            .out = out_TND.data_ptr(),
                            .out_type = dtype_of(out_TND),
                            .rows = x_TND.size(0),
                            .heads = x_TND.size(1),
                            .size = x_TND.size(2),
                            .turned = cos_sin_PR.size(1),
                            .num_positions = cos_sin_PR.size(0),
                            .num_threads = static_cast<int>(num_threads)});
}

eprt::PagedRows paged_rows(const Tensor& rows_PSX, const OptionalTensor& row_Y) {
  const int64_t itemsize = rows_PSX.element_size();
  return {.data = static_cast<char*>(rows_PSX.data_ptr()),
          .num_pages = rows_PSX.size(0),
          .page_rows = rows_PSX.size(1),
          .page_bytes = rows_PSX.stride(0) * itemsize,
          .row_bytes = rows_PSX.stride(1) * itemsize,
          .row = row_Y ? data_of<int64_t>(*row_Y) : nullptr};
}

int64_t copy_paged_rows(Tensor to_PSX, OptionalTensor to_row_Y, Tensor from_PSX, OptionalTensor from_row_Y,
                        int64_t count) {
  const int64_t bytes = from_PSX.size(2) * from_PSX.element_size();
  STD_TORCH_CHECK(bytes == to_PSX.size(2) * to_PSX.element_size(), "copy_paged_rows: rows of different sizes");
  return eprt::copy_paged_rows(paged_rows(to_PSX, to_row_Y), paged_rows(from_PSX, from_row_Y), count, bytes);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eprt, m) {
  m.def(
      "stream_mix(Tensor x_TMH, Tensor fn_KW, Tensor base_K, Tensor scale, float eps, float norm_eps, int iterations, "
      "Tensor(a!) row_TH, Tensor(b!)? mixed_TMH, Tensor(c!)? post_TM, int num_threads) -> ()");
  m.def("stream_expand(Tensor mixed_TMH, Tensor post_TM, Tensor y_TH, Tensor(a!) out_TMH, int num_threads) -> ()");
  // These return the first row that reaches outside a tensor (nothing is computed then), or -1.
  m.def(
      "shared_attention(Tensor query_TND, Tensor local_XD, Tensor local_begin_T, Tensor local_end_T, "
      "Tensor entries_PED, Tensor table_BP, Tensor request_T, Tensor num_entries_T, Tensor? slot_TK, Tensor sink_N, "
      "float scale, int rope_size, Tensor(a!) out_TND, int num_threads) -> int");
  m.def(
      "turned_rows(Tensor x_TND, bool is_normed, Tensor? weight_D, float eps, Tensor cos_sin_PR, Tensor position_T, "
      "bool reversed, Tensor(a!) out_TND, int num_threads) -> int");
  m.def("copy_paged_rows(Tensor(a!) to_PSX, Tensor? to_row_Y, Tensor from_PSX, Tensor? from_row_Y, int count) -> int");
  m.def("entries_to_fp8(Tensor values_XD, int rope_size, Tensor(a!) entries_XW) -> ()");
  m.def("pool_entries(Tensor state_S2C, Tensor index_XR, int first_slots, Tensor(a!) out_XD, int num_threads) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(eprt, CompositeExplicitAutograd, m) {
  m.impl("stream_mix", TORCH_BOX(&stream_mix));
  m.impl("stream_expand", TORCH_BOX(&stream_expand));
  m.impl("shared_attention", TORCH_BOX(&shared_attention));
  m.impl("turned_rows", TORCH_BOX(&turned_rows));
  m.impl("copy_paged_rows", TORCH_BOX(&copy_paged_rows));
  m.impl("entries_to_fp8", TORCH_BOX(&entries_to_fp8));
  m.impl("pool_entries", TORCH_BOX(&pool_entries));
}
