// The operators that compute half a decoder layer for a step of decodes; see ops.cpp and cpu/decode_layer.h.
// Shapes are checked here; eprt/ops/decode_layer.py checks that weights are contiguous.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <tuple>

#include "cpu/decode_layer.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

using OptionalTensor = std::optional<Tensor>;

eprt::Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return eprt::Dtype::kFloat32;
    case ScalarType::BFloat16:
      return eprt::Dtype::kBFloat16;
    case ScalarType::Float8_e4m3fn:
      return eprt::Dtype::kFp8E4M3;
    case ScalarType::Char:
      return eprt::Dtype::kInt8;
    default:
      STD_TORCH_CHECK(false, "expected float32, bfloat16, float8_e4m3fn or int8");
  }
}

template <class T>
const T* data_of(const OptionalTensor& t) {
  return t ? static_cast<const T*>(t->data_ptr()) : nullptr;
}

// A matrix [N, K], or the first one of a stack [E, N, K].
eprt::Matrix matrix_of(const Tensor& data, const OptionalTensor& scale) {
  const int64_t dim = data.dim();
  return {data.data_ptr(),    data_of<float>(scale), dtype_of(data),
          data.size(dim - 2), data.size(dim - 1),    eprt::kNoLimit};
}
eprt::Matrix matrix_or_none(const OptionalTensor& data, const OptionalTensor& scale) {
  return data ? matrix_of(*data, scale) : eprt::Matrix{nullptr, nullptr, eprt::Dtype::kFloat32, 0, 0};
}

eprt::Projection projection_of(const Tensor& w, const OptionalTensor& scale, const OptionalTensor& bias) {
  return {matrix_of(w, scale), data_of<float>(bias)};
}

eprt::NormWeight norm_of(const Tensor& weight, double eps) {
  return {weight.data_ptr(), dtype_of(weight), static_cast<float>(eps)};
}

eprt::Rows rows_of(const Tensor& x) { return {x.data_ptr(), dtype_of(x), x.stride(0)}; }

eprt::LatentInsertArgs insert_args(const Tensor& kv_pages, const Tensor& kv_slot_T, const Tensor& norm_L, double eps,
                                   const Tensor& cos_sin_PR, const Tensor& position_T, bool interleaved) {
  return {.entry = {.pages = kv_pages.data_ptr(),
                    .page_stride = kv_pages.stride(0),
                    .row_stride = kv_pages.stride(1),
                    .num_pages = kv_pages.size(0),
                    .page_size = kv_pages.size(1),
                    .page_type = dtype_of(kv_pages),
                    .slot = static_cast<const int64_t*>(kv_slot_T.data_ptr()),
                    .kv = nullptr,
                    .kv_row = 0,
                    .kv_type = eprt::Dtype::kFloat32,
                    .rows = 0,
                    .size = kv_pages.size(2),
                    .num_threads = 1},
          .latent_size = norm_L.size(0),
          .weight = norm_L.data_ptr(),
          .weight_type = dtype_of(norm_L),
          .eps = static_cast<float>(eps),
          .cos_sin = static_cast<const float*>(cos_sin_PR.data_ptr()),
          .position = static_cast<const int64_t*>(position_T.data_ptr()),
          .num_positions = cos_sin_PR.size(0),
          .interleaved = interleaved};
}

eprt::MlaArgs mla_args(const Tensor& kv_pages, const Tensor& page_table_BP, const Tensor& seq_len_B,
                       const Tensor& w_kv_b, int64_t heads, int64_t nope, double softmax_scale) {
  const int64_t lora = w_kv_b.size(1);
  return {.q_nope = nullptr,
          .q_nope_row = 0,
          .q_nope_head = 0,
          .q_rope = nullptr,
          .q_rope_row = 0,
          .q_rope_head = 0,
          .q_type = eprt::Dtype::kFloat32,
          .kv = kv_pages.data_ptr(),
          .kv_page = kv_pages.stride(0),
          .kv_row = kv_pages.stride(1),
          .num_pages = kv_pages.size(0),
          .page_size = kv_pages.size(1),
          .kv_type = dtype_of(kv_pages),
          .page_table = static_cast<const int32_t*>(page_table_BP.data_ptr()),
          .page_table_row = page_table_BP.stride(0),
          .page_table_width = page_table_BP.size(1),
          .seq_len = static_cast<const int32_t*>(seq_len_B.data_ptr()),
          .query_start = nullptr,
          .w_kv_b = w_kv_b.data_ptr(),
          .w_type = dtype_of(w_kv_b),
          .out = nullptr,
          .num_requests = seq_len_B.size(0),
          .num_rows = seq_len_B.size(0),
          .num_heads = heads,
          .nope = nope,
          .rope = kv_pages.size(2) - lora,
          .lora = lora,
          .value = w_kv_b.size(0) / heads - nope,
          .softmax_scale = static_cast<float>(softmax_scale),
          .num_threads = 1};
}

bool has_size(const OptionalTensor& t, int64_t n) { return !t || t->numel() == n; }
bool is_fp32(const OptionalTensor& t) { return !t || t->scalar_type() == ScalarType::Float; }

void check_attend(const eprt::AttendDecodesArgs& args, int64_t hidden) {
  const int64_t queries = args.mla.num_heads * (args.mla.nope + args.mla.rope);
  const int64_t before = args.qkv_a.w.n - args.insert.entry.size;
  const bool has_latents = args.q_norm.data != nullptr;
  STD_TORCH_CHECK(args.qkv_a.w.k == hidden && args.o.w.n == hidden && before > 0 &&
                      args.o.w.k == args.mla.num_heads * args.mla.value && args.insert.latent_size == args.mla.lora &&
                      (has_latents ? args.q_b.w.n == queries && args.q_b.w.k == before : before == queries),
                  "attend_decodes: shapes differ");
}

int64_t attend_decodes(Tensor x_TH, Tensor norm_H, double eps, Tensor qkv, OptionalTensor qkv_scale,
                       OptionalTensor qkv_bias, OptionalTensor q_norm_A, double q_eps, OptionalTensor q_b,
                       OptionalTensor q_b_scale, OptionalTensor q_b_bias, Tensor kv_norm_L, double kv_eps,
                       Tensor cos_sin_PR, bool interleaved, Tensor w_kv_b, int64_t heads, int64_t nope,
                       double softmax_scale, Tensor o, OptionalTensor o_scale, OptionalTensor o_bias,
                       Tensor next_norm_H, double next_eps, Tensor kv_pages, Tensor kv_slot_T, Tensor position_T,
                       Tensor page_table_BP, Tensor seq_len_B, Tensor h_TH, Tensor sum_TH, int64_t num_threads) {
  const int64_t rows = x_TH.size(0);
  const eprt::AttendDecodesArgs args{
      .x = rows_of(x_TH),
      .rows = rows,
      .norm = norm_of(norm_H, eps),
      .qkv_a = projection_of(qkv, qkv_scale, qkv_bias),
      .q_norm = q_norm_A ? norm_of(*q_norm_A, q_eps) : eprt::NormWeight{nullptr, eprt::Dtype::kFloat32, 0},
      .q_b = {matrix_or_none(q_b, q_b_scale), data_of<float>(q_b_bias)},
      .insert = insert_args(kv_pages, kv_slot_T, kv_norm_L, kv_eps, cos_sin_PR, position_T, interleaved),
      .mla = mla_args(kv_pages, page_table_BP, seq_len_B, w_kv_b, heads, nope, softmax_scale),
      .o = projection_of(o, o_scale, o_bias),
      .next_norm = norm_of(next_norm_H, next_eps),
      .h = h_TH.data_ptr(),
      .sum = sum_TH.data_ptr(),
      .num_threads = static_cast<int>(num_threads)};
  STD_TORCH_CHECK(kv_pages.dim() == 3 && kv_pages.stride(2) == 1 && x_TH.stride(1) == 1,
                  "attend_decodes: entries and rows must be contiguous");
  check_attend(args, x_TH.size(1));
  STD_TORCH_CHECK(kv_slot_T.scalar_type() == ScalarType::Long && position_T.scalar_type() == ScalarType::Long &&
                      page_table_BP.scalar_type() == ScalarType::Int && seq_len_B.scalar_type() == ScalarType::Int &&
                      page_table_BP.stride(1) == 1,
                  "attend_decodes: slots and positions must be int64, pages and lengths int32");
  STD_TORCH_CHECK(kv_slot_T.numel() == rows && position_T.numel() == rows && page_table_BP.size(0) == rows &&
                      seq_len_B.numel() == rows,
                  "attend_decodes: ", rows, " rows need a slot, a position and a request each");
  STD_TORCH_CHECK(norm_H.numel() == x_TH.size(1) && next_norm_H.numel() == x_TH.size(1) &&
                      has_size(q_norm_A, args.qkv_a.w.n - args.insert.entry.size) &&
                      has_size(qkv_bias, args.qkv_a.w.n) && has_size(q_b_bias, args.q_b.w.n) &&
                      has_size(o_bias, x_TH.size(1)),
                  "attend_decodes: norms or biases do not fit");
  STD_TORCH_CHECK(is_fp32(qkv_bias) && is_fp32(q_b_bias) && is_fp32(o_bias) && is_fp32(cos_sin_PR) &&
                      cos_sin_PR.dim() == 2 && cos_sin_PR.size(1) == args.mla.rope,
                  "attend_decodes: biases and the rotation's table must be float32, the table as wide as the rotation");
  return eprt::attend_decodes(args);
}

std::tuple<int64_t, int64_t> mix_decodes(Tensor h_TH, OptionalTensor token_id_T, Tensor gate, OptionalTensor bias_E,
                                         int64_t scoring, int64_t n_group, int64_t topk_group, bool normalise,
                                         double scale, Tensor slot_L, Tensor matrix_of_slot, Tensor w13,
                                         OptionalTensor w13_scale, Tensor w2, OptionalTensor w2_scale,
                                         OptionalTensor shared_w13, OptionalTensor shared_w13_scale,
                                         OptionalTensor shared_w2, OptionalTensor shared_w2_scale, Tensor load_S,
                                         Tensor expert_idx_TK, Tensor y_TH, int64_t num_threads) {
  const int64_t top_k = expert_idx_TK.size(1), experts = gate.size(0);
  const eprt::MixDecodesArgs args{.h = rows_of(h_TH),
                                  .rows = h_TH.size(0),
                                  .gate = matrix_of(gate, std::nullopt),
                                  .rule = {.logits = nullptr,
                                           .bias = data_of<float>(bias_E),
                                           .rows = h_TH.size(0),
                                           .experts = experts,
                                           .top_k = top_k,
                                           .n_group = n_group,
                                           .topk_group = topk_group,
                                           .scoring = static_cast<eprt::Scoring>(scoring),
                                           .normalise = normalise,
                                           .scale = static_cast<float>(scale),
                                           .weights = nullptr,
                                           .expert_idx = static_cast<int64_t*>(expert_idx_TK.data_ptr()),
                                           .is_given = false,
                                           .token_id = data_of<int64_t>(token_id_T),
                                           .slot = static_cast<const int64_t*>(slot_L.data_ptr()),
                                           .slot_idx = nullptr},
                                  .num_slots = matrix_of_slot.numel(),
                                  .matrix_of_slot = static_cast<const int32_t*>(matrix_of_slot.data_ptr()),
                                  .num_matrices = w13.size(0),
                                  .w13 = matrix_of(w13, w13_scale),
                                  .w2 = matrix_of(w2, w2_scale),
                                  .shared_w13 = matrix_or_none(shared_w13, shared_w13_scale),
                                  .shared_w2 = matrix_or_none(shared_w2, shared_w2_scale),
                                  .load = static_cast<int64_t*>(load_S.data_ptr()),
                                  .y = y_TH.data_ptr(),
                                  .num_threads = static_cast<int>(num_threads)};
  const int64_t hidden = h_TH.size(1);
  const bool fits = args.gate.k == hidden && args.w13.k == hidden && args.w13.n == 2 * args.w2.k &&
                    args.w2.n == hidden && w2.size(0) == args.num_matrices && slot_L.numel() == experts + 1 &&
                    load_S.numel() == args.num_slots && expert_idx_TK.size(0) == args.rows;
  const bool shared_fits = !shared_w13 || (args.shared_w13.k == hidden && args.shared_w2.n == hidden &&
                                           args.shared_w13.n == 2 * args.shared_w2.k);
  STD_TORCH_CHECK(
      expert_idx_TK.scalar_type() == ScalarType::Long && load_S.scalar_type() == ScalarType::Long &&
          slot_L.scalar_type() == ScalarType::Long && matrix_of_slot.scalar_type() == ScalarType::Int &&
          (!token_id_T || (token_id_T->scalar_type() == ScalarType::Long && token_id_T->numel() == args.rows)),
      "mix_decodes: ids, experts and slots must be int64, matrices int32");
  STD_TORCH_CHECK(fits && shared_fits, "mix_decodes: shapes differ");
  STD_TORCH_CHECK(args.rows * top_k <= eprt::kMostExpertRows && top_k <= eprt::kMostTopK, "mix_decodes: ", args.rows,
                  " rows of ", top_k, " experts are too many");
  const eprt::MixedDecodes mixed = eprt::mix_decodes(args);
  return {mixed.num_tokens, mixed.compute_ns};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eprt, m) {
  // The following do nothing where a slot, a position, a page or an expert's matrix does not exist, and say so.
  m.def(
      "attend_decodes(Tensor x_TH, Tensor norm_H, float eps, Tensor qkv, Tensor? qkv_scale, Tensor? qkv_bias, "
      "Tensor? q_norm_A, float q_eps, Tensor? q_b, Tensor? q_b_scale, Tensor? q_b_bias, Tensor kv_norm_L, "
      "float kv_eps, Tensor cos_sin_PR, bool interleaved, Tensor w_kv_b, int heads, int nope, float softmax_scale, "
      "Tensor o, Tensor? o_scale, Tensor? o_bias, Tensor next_norm_H, float next_eps, Tensor(a!) kv_pages, "
      "Tensor kv_slot_T, Tensor position_T, Tensor page_table_BP, Tensor seq_len_B, Tensor(b!) h_TH, "
      "Tensor(c!) sum_TH, int num_threads) -> int");
  m.def(
      "mix_decodes(Tensor h_TH, Tensor? token_id_T, Tensor gate, Tensor? bias_E, int scoring, int n_group, "
      "int topk_group, bool normalise, float scale, Tensor slot_L, Tensor matrix_of_slot, Tensor w13, "
      "Tensor? w13_scale, Tensor w2, Tensor? w2_scale, Tensor? shared_w13, Tensor? shared_w13_scale, "
      "Tensor? shared_w2, Tensor? shared_w2_scale, Tensor(a!) load_S, Tensor(b!) expert_idx_TK, Tensor(c!) y_TH, "
      "int num_threads) -> (int, int)");
}

STABLE_TORCH_LIBRARY_IMPL(eprt, CompositeExplicitAutograd, m) {
  m.impl("attend_decodes", TORCH_BOX(&attend_decodes));
  m.impl("mix_decodes", TORCH_BOX(&mix_decodes));
}
