// Declares the library's operators and passes raw pointers and sizes to the kernels in cpu/. Only this file,
// ops_ep.cpp and ops_v4.cpp include torch; they use the libtorch stable ABI, so one binary serves every torch >= 2.11.
//
// eprt/ops/*.py checks shapes and dtypes and words the errors; the checks here protect memory.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>

#include "cpu/buffer.h"
#include "cpu/draw.h"
#include "cpu/fp4.h"
#include "cpu/gate.h"
#include "cpu/gemm.h"
#include "cpu/index_topk.h"
#include "cpu/isa.h"
#include "cpu/mla.h"
#include "cpu/rowwise.h"
#include "cpu/team.h"
#include "cpu/token_mask.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// ---- instruction set ------------------------------------------------------------------------------------------------

int64_t cpu_isa() { return static_cast<int64_t>(eprt::cpu_isa()); }
int64_t cpu_isa_detected() { return static_cast<int64_t>(eprt::detect_isa()); }
void set_cpu_isa(int64_t isa) { eprt::set_cpu_isa(static_cast<eprt::Isa>(isa)); }

// ---- matrix products ------------------------------------------------------------------------------------------------

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
    case ScalarType::Byte:
      return eprt::Dtype::kFp4;
    default:
      STD_TORCH_CHECK(false, "expected float32, bfloat16, float8_e4m3fn, int8 or, for fp4, uint8");
  }
}

const float* floats_or_null(const OptionalTensor& t) {
  return t.has_value() ? static_cast<const float*>(t->data_ptr()) : nullptr;
}

// A matrix [N, K], or the first one of a stack [E, N, K].
eprt::Matrix matrix_of(const Tensor& data, const OptionalTensor& scale) {
  const int64_t dim = data.dim();
  if (data.scalar_type() == ScalarType::Byte) {
    const int64_t n = data.size(dim - 2), k = data.size(dim - 1) * 2;
    STD_TORCH_CHECK(k % eprt::kFp4Block == 0 && scale && scale->scalar_type() == ScalarType::Byte &&
                        scale->numel() * eprt::kFp4Block == data.numel() * 2,
                    "an fp4 matrix needs one exponent per ", eprt::kFp4Block, " columns");
    return {data.data_ptr(),
            nullptr,
            eprt::Dtype::kFp4,
            n,
            k,
            eprt::kNoLimit,
            static_cast<const uint8_t*>(scale->data_ptr())};
  }
  return {data.data_ptr(),    floats_or_null(scale), dtype_of(data),
          data.size(dim - 2), data.size(dim - 1),    eprt::kNoLimit};
}

void emulate_amx(bool on) { eprt::emulate_amx(on); }

void own_threads(bool on) { eprt::use_own_threads(on); }

eprt::Rows rows_of(const Tensor& x) { return {x.data_ptr(), dtype_of(x), x.stride(0)}; }

void linear(const Tensor& y, const Tensor& x, const Tensor& w, const OptionalTensor& w_scale,
            const OptionalTensor& bias, int64_t num_threads) {
  STD_TORCH_CHECK(x.size(1) == w.size(1) && y.size(1) == w.size(0) && y.size(0) == x.size(0), "linear: shapes differ");
  STD_TORCH_CHECK(w.scalar_type() != ScalarType::Byte, "linear: fp4 weights are those of experts alone");
  eprt::linear(rows_of(x), x.size(0), matrix_of(w, w_scale), floats_or_null(bias), y.data_ptr(),
               static_cast<int>(num_threads));
}

void grouped_experts(const Tensor& y, const Tensor& x, const Tensor& recv_count, const OptionalTensor& matrix_of_expert,
                     const Tensor& w13, const OptionalTensor& w13_scale, const Tensor& w2,
                     const OptionalTensor& w2_scale, double limit, int64_t num_threads) {
  const int64_t num_experts = recv_count.numel(), num_matrices = w13.size(0);
  eprt::Matrix first = matrix_of(w13, w13_scale);
  const eprt::Matrix second = matrix_of(w2, w2_scale);
  first.limit = static_cast<float>(limit);
  STD_TORCH_CHECK(x.size(1) == first.k && first.n == 2 * second.k && y.size(1) == second.n && y.size(0) == x.size(0) &&
                      w2.size(0) == num_matrices,
                  "grouped_experts: shapes differ");
  STD_TORCH_CHECK(matrix_of_expert ? matrix_of_expert->numel() == num_experts : num_matrices == num_experts,
                  "grouped_experts: each of the ", num_experts, " experts needs a matrix");
  const auto* count = static_cast<const int32_t*>(recv_count.data_ptr());
  const auto* matrix = matrix_of_expert ? static_cast<const int32_t*>(matrix_of_expert->data_ptr()) : nullptr;
  int64_t total = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    STD_TORCH_CHECK(count[e] >= 0, "grouped_experts: recv_count_E[", e, "] is ", count[e]);
    STD_TORCH_CHECK(count[e] == 0 || matrix == nullptr || (matrix[e] >= 0 && matrix[e] < num_matrices),
                    "grouped_experts: matrix_E[", e, "] is ", matrix == nullptr ? 0 : matrix[e], ", not in 0..",
                    num_matrices - 1);
    total += count[e];
  }
  STD_TORCH_CHECK(total <= x.size(0), "grouped_experts: recv_count_E sums to ", total, ", x_RH has only ", x.size(0),
                  " rows");
  eprt::grouped_experts(rows_of(x), count, num_experts, matrix, first, second, y.data_ptr(),
                        static_cast<int>(num_threads));
}

// ---- gate -----------------------------------------------------------------------------------------------------------

void gate_topk(Tensor logits_TE, OptionalTensor bias_E, int64_t scoring, int64_t n_group, int64_t topk_group,
               bool normalise, double scale, Tensor weights_TK, Tensor expert_idx_TK, bool is_given,
               OptionalTensor token_id_T, OptionalTensor slot_L, OptionalTensor slot_idx_TK, int64_t num_threads) {
  eprt::gate_topk({.logits = static_cast<const float*>(logits_TE.data_ptr()),
                   .bias = bias_E ? static_cast<const float*>(bias_E->data_ptr()) : nullptr,
                   .rows = logits_TE.size(0),
                   .experts = logits_TE.size(1),
                   .top_k = weights_TK.size(1),
                   .n_group = n_group,
                   .topk_group = topk_group,
                   .scoring = static_cast<eprt::Scoring>(scoring),
                   .normalise = normalise,
                   .scale = static_cast<float>(scale),
                   .weights = static_cast<float*>(weights_TK.data_ptr()),
                   .expert_idx = static_cast<int64_t*>(expert_idx_TK.data_ptr()),
                   .is_given = is_given,
                   .token_id = token_id_T ? static_cast<const int64_t*>(token_id_T->data_ptr()) : nullptr,
                   .slot = slot_L ? static_cast<const int64_t*>(slot_L->data_ptr()) : nullptr,
                   .slot_idx = slot_idx_TK ? static_cast<int64_t*>(slot_idx_TK->data_ptr()) : nullptr},
                  static_cast<int>(num_threads));
}

void draw(Tensor logits_XV, Tensor row_Y, Tensor temperature_Y, Tensor min_p_Y, Tensor top_k_Y, Tensor top_p_Y,
          Tensor u_Y, Tensor token_Y, int64_t num_threads) {
  eprt::draw({.logits = static_cast<const float*>(logits_XV.data_ptr()),
              .logits_row = logits_XV.stride(0),
              .row = static_cast<const int64_t*>(row_Y.data_ptr()),
              .temperature = static_cast<const float*>(temperature_Y.data_ptr()),
              .min_p = static_cast<const double*>(min_p_Y.data_ptr()),
              .top_k = static_cast<const int64_t*>(top_k_Y.data_ptr()),
              .top_p = static_cast<const double*>(top_p_Y.data_ptr()),
              .u = static_cast<const double*>(u_Y.data_ptr()),
              .token = static_cast<int64_t*>(token_Y.data_ptr()),
              .rows = row_Y.size(0),
              .vocab = logits_XV.size(1),
              .num_threads = static_cast<int>(num_threads)});
}

void largest(Tensor logits_XV, Tensor token_X, int64_t num_threads) {
  STD_TORCH_CHECK(token_X.numel() == logits_XV.size(0), "largest: shapes differ");
  eprt::largest({.logits = static_cast<const float*>(logits_XV.data_ptr()),
                 .logits_row = logits_XV.stride(0),
                 .token = static_cast<int64_t*>(token_X.data_ptr()),
                 .rows = logits_XV.size(0),
                 .vocab = logits_XV.size(1),
                 .num_threads = static_cast<int>(num_threads)});
}

void mask_tokens(Tensor logits_XV, Tensor bits_YB, Tensor row_Y, int64_t num_threads) {
  const auto* row = static_cast<const int64_t*>(row_Y.data_ptr());
  const int64_t rows = row_Y.numel(), vocab = logits_XV.size(1), bytes = bits_YB.size(1);
  STD_TORCH_CHECK(bits_YB.size(0) == rows && bytes % 4 == 0 && bytes * 8 >= vocab, "mask_tokens: shapes differ");
  for (int64_t i = 0; i < rows; ++i) {
    STD_TORCH_CHECK(row[i] >= 0 && row[i] < logits_XV.size(0), "mask_tokens: row_Y[", i, "] is ", row[i]);
  }
  eprt::mask_tokens({.logits = static_cast<float*>(logits_XV.data_ptr()),
                     .logits_row = logits_XV.stride(0),
                     .words = static_cast<const uint32_t*>(bits_YB.data_ptr()),
                     .words_per_row = bytes / 4,
                     .row = row,
                     .rows = rows,
                     .vocab = vocab,
                     .num_threads = static_cast<int>(num_threads)});
}

// ---- row-wise -------------------------------------------------------------------------------------------------------

void rms_norm(Tensor x_TH, Tensor weight_H, double eps, Tensor out_TH, int64_t num_threads) {
  eprt::rms_norm({.x = x_TH.data_ptr(),
                  .x_row = x_TH.stride(0),
                  .residual = nullptr,
                  .residual_row = 0,
                  .weight = weight_H.data_ptr(),
                  .weight_type = dtype_of(weight_H),
                  .sum = nullptr,
                  .out = out_TH.data_ptr(),
                  .type = dtype_of(x_TH),
                  .rows = x_TH.size(0),
                  .size = x_TH.size(1),
                  .eps = static_cast<float>(eps),
                  .num_threads = static_cast<int>(num_threads)});
}

void add_rms_norm(Tensor x_TH, Tensor residual_TH, Tensor weight_H, double eps, Tensor out_TH, Tensor sum_TH,
                  int64_t num_threads) {
  eprt::rms_norm({.x = x_TH.data_ptr(),
                  .x_row = x_TH.stride(0),
                  .residual = residual_TH.data_ptr(),
                  .residual_row = residual_TH.stride(0),
                  .weight = weight_H.data_ptr(),
                  .weight_type = dtype_of(weight_H),
                  .sum = sum_TH.data_ptr(),
                  .out = out_TH.data_ptr(),
                  .type = dtype_of(x_TH),
                  .rows = x_TH.size(0),
                  .size = x_TH.size(1),
                  .eps = static_cast<float>(eps),
                  .num_threads = static_cast<int>(num_threads)});
}

void silu_mul(Tensor x_TI2, Tensor out_TI, double limit, int64_t num_threads) {
  eprt::silu_mul({.x = x_TI2.data_ptr(),
                  .x_row = x_TI2.stride(0),
                  .out = out_TI.data_ptr(),
                  .type = dtype_of(x_TI2),
                  .rows = out_TI.size(0),
                  .size = out_TI.size(1),
                  .limit = static_cast<float>(limit),
                  .num_threads = static_cast<int>(num_threads)});
}

eprt::RopeArgs rope_args(const Tensor& x_TNR, const Tensor& cos_sin_PR, const Tensor& position_T, bool interleaved,
                         void* out, int64_t num_threads) {
  return {.x = x_TNR.data_ptr(),
          .x_row = x_TNR.stride(0),
          .x_head = x_TNR.stride(1),
          .cos_sin = static_cast<const float*>(cos_sin_PR.data_ptr()),
          .position = static_cast<const int64_t*>(position_T.data_ptr()),
          .out = out,
          .type = dtype_of(x_TNR),
          .rows = x_TNR.size(0),
          .heads = x_TNR.size(1),
          .size = x_TNR.size(2),
          .num_positions = cos_sin_PR.size(0),
          .interleaved = interleaved,
          .num_threads = static_cast<int>(num_threads)};
}

int64_t rope(Tensor x_TNR, Tensor cos_sin_PR, Tensor position_T, bool interleaved, Tensor out_TNR,
             int64_t num_threads) {
  return eprt::rope(rope_args(x_TNR, cos_sin_PR, position_T, interleaved, out_TNR.data_ptr(), num_threads));
}

eprt::CacheInsertArgs cache_insert_args(const Tensor& kv_pages, const Tensor& kv_slot_T, const Tensor& kv_TD,
                                        int64_t num_threads) {
  return {.pages = kv_pages.data_ptr(),
          .page_stride = kv_pages.stride(0),
          .row_stride = kv_pages.stride(1),
          .num_pages = kv_pages.size(0),
          .page_size = kv_pages.size(1),
          .page_type = dtype_of(kv_pages),
          .slot = static_cast<const int64_t*>(kv_slot_T.data_ptr()),
          .kv = kv_TD.data_ptr(),
          .kv_row = kv_TD.stride(0),
          .kv_type = dtype_of(kv_TD),
          .rows = kv_TD.size(0),
          .size = kv_TD.size(1),
          .num_threads = static_cast<int>(num_threads)};
}

int64_t cache_insert(Tensor kv_pages, Tensor kv_slot_T, Tensor kv_TD, int64_t num_threads) {
  return eprt::cache_insert(cache_insert_args(kv_pages, kv_slot_T, kv_TD, num_threads));
}

int64_t latent_insert(Tensor kv_pages, Tensor kv_slot_T, Tensor kv_TD, Tensor norm_weight_L, double eps,
                      Tensor cos_sin_PR, Tensor position_T, bool interleaved, int64_t num_threads) {
  return eprt::latent_insert({.entry = cache_insert_args(kv_pages, kv_slot_T, kv_TD, num_threads),
                              .latent_size = norm_weight_L.size(0),
                              .weight = norm_weight_L.data_ptr(),
                              .weight_type = dtype_of(norm_weight_L),
                              .eps = static_cast<float>(eps),
                              .cos_sin = static_cast<const float*>(cos_sin_PR.data_ptr()),
                              .position = static_cast<const int64_t*>(position_T.data_ptr()),
                              .num_positions = cos_sin_PR.size(0),
                              .interleaved = interleaved});
}

// ---- attention ------------------------------------------------------------------------------------------------------

eprt::MlaArgs mla_args(const Tensor& q_nope, const Tensor& q_rope, const Tensor& kv_pages, const Tensor& page_table,
                       const Tensor& seq_len, const Tensor& w_kv_b, double softmax_scale, const Tensor& out,
                       int64_t num_threads) {
  return {.q_nope = q_nope.data_ptr(),
          .q_nope_row = q_nope.stride(0),
          .q_nope_head = q_nope.stride(1),
          .q_rope = q_rope.data_ptr(),
          .q_rope_row = q_rope.stride(0),
          .q_rope_head = q_rope.stride(1),
          .q_type = dtype_of(q_nope),
          .kv = kv_pages.data_ptr(),
          .kv_page = kv_pages.stride(0),
          .kv_row = kv_pages.stride(1),
          .num_pages = kv_pages.size(0),
          .page_size = kv_pages.size(1),
          .kv_type = kv_pages.scalar_type() == ScalarType::Byte ? eprt::Dtype::kFp8E4M3 : dtype_of(kv_pages),
          .page_table = static_cast<const int32_t*>(page_table.data_ptr()),
          .page_table_row = page_table.stride(0),
          .page_table_width = page_table.size(1),
          .seq_len = static_cast<const int32_t*>(seq_len.data_ptr()),
          .query_start = nullptr,
          .w_kv_b = w_kv_b.data_ptr(),
          .w_type = dtype_of(w_kv_b),
          .out = out.data_ptr(),
          .num_requests = seq_len.size(0),
          .num_rows = q_nope.size(0),
          .num_heads = q_nope.size(1),
          .nope = q_nope.size(2),
          .rope = q_rope.size(2),
          .lora = w_kv_b.size(1),
          .value = out.size(2),
          .softmax_scale = static_cast<float>(softmax_scale),
          .num_threads = static_cast<int>(num_threads)};
}

// cos_sin_PR: q_rope is not rotated yet. Where a position lies outside of it: its row plus the number of rows.
int64_t mla_decode(Tensor q_nope_BNC, Tensor q_rope_BNR, Tensor kv_pages, Tensor page_table_BP, Tensor seq_len_B,
                   Tensor w_kv_b, double softmax_scale, OptionalTensor cos_sin_PR, OptionalTensor position_B,
                   bool interleaved, Tensor out_BNV, int64_t num_threads) {
  eprt::MlaArgs args =
      mla_args(q_nope_BNC, q_rope_BNR, kv_pages, page_table_BP, seq_len_B, w_kv_b, softmax_scale, out_BNV, num_threads);
  const int64_t bad = eprt::mla_first_bad_request(args);
  if (bad >= 0) return bad;
  if (!cos_sin_PR) return eprt::mla_decode(args), -1;
  const eprt::Buffer<float> rotated(q_rope_BNR.numel());  // room for either type
  const int64_t bad_row =
      eprt::rope(rope_args(q_rope_BNR, *cos_sin_PR, *position_B, interleaved, rotated.get(), num_threads));
  if (bad_row >= 0) return args.num_rows + bad_row;
  args.q_rope = rotated.get();
  args.q_rope_row = args.num_heads * args.rope;
  args.q_rope_head = args.rope;
  eprt::mla_decode(args);
  return -1;
}

int64_t mla_extend(Tensor q_nope_TNC, Tensor q_rope_TNR, Tensor kv_pages, Tensor page_table_BP, Tensor seq_len_B,
                   Tensor query_start_B1, Tensor w_kv_b, double softmax_scale, Tensor out_TNV, int64_t num_threads) {
  eprt::MlaArgs args =
      mla_args(q_nope_TNC, q_rope_TNR, kv_pages, page_table_BP, seq_len_B, w_kv_b, softmax_scale, out_TNV, num_threads);
  args.query_start = static_cast<const int32_t*>(query_start_B1.data_ptr());
  const int64_t bad = eprt::mla_first_bad_request(args);
  if (bad < 0) eprt::mla_extend(args);
  return bad;
}

int64_t index_topk(Tensor query_TND, Tensor weight_TN, Tensor key_pages, Tensor page_table_BP, Tensor request_T,
                   Tensor length_T, Tensor slot_TK, int64_t num_threads) {
  const bool is_fp8 = key_pages.scalar_type() == ScalarType::Byte && key_pages.size(2) > query_TND.size(2);
  const eprt::IndexArgs args{.query = query_TND.data_ptr(),
                             .query_row = query_TND.stride(0),
                             .query_head = query_TND.stride(1),
                             .query_type = dtype_of(query_TND),
                             .weight = static_cast<const float*>(weight_TN.data_ptr()),
                             .keys = key_pages.data_ptr(),
                             .key_page = key_pages.stride(0),
                             .key_row = key_pages.stride(1),
                             .num_pages = key_pages.size(0),
                             .page_size = key_pages.size(1),
                             .key_type = is_fp8 ? eprt::Dtype::kFp8E4M3 : dtype_of(key_pages),
                             .page_table = static_cast<const int32_t*>(page_table_BP.data_ptr()),
                             .page_table_row = page_table_BP.stride(0),
                             .page_table_width = page_table_BP.size(1),
                             .request = static_cast<const int32_t*>(request_T.data_ptr()),
                             .length = static_cast<const int32_t*>(length_T.data_ptr()),
                             .slot = static_cast<int32_t*>(slot_TK.data_ptr()),
                             .num_rows = query_TND.size(0),
                             .num_requests = page_table_BP.size(0),
                             .heads = query_TND.size(1),
                             .size = query_TND.size(2),
                             .top_k = slot_TK.size(1),
                             .num_threads = static_cast<int>(num_threads)};
  const int64_t bad = eprt::index_first_bad_row(args);
  if (bad < 0) eprt::index_topk(args);
  return bad;
}

}  // namespace

STABLE_TORCH_LIBRARY(eprt, m) {
  m.def("cpu_isa() -> int");
  m.def("cpu_isa_detected() -> int");
  m.def("set_cpu_isa(int isa) -> ()");
  m.def("emulate_amx(bool on) -> ()");
  m.def("own_threads(bool on) -> ()");
  m.def("linear(Tensor(a!) y, Tensor x, Tensor w, Tensor? w_scale, Tensor? bias, int num_threads) -> ()");
  m.def(
      "grouped_experts(Tensor(a!) y, Tensor x, Tensor recv_count, Tensor? matrix_of_expert, Tensor w13, "
      "Tensor? w13_scale, Tensor w2, Tensor? w2_scale, float limit, int num_threads) -> ()");
  m.def(
      "gate_topk(Tensor logits_TE, Tensor? bias_E, int scoring, int n_group, int topk_group, bool normalise, "
      "float scale, Tensor(a!) weights_TK, Tensor(b!) expert_idx_TK, bool is_given, Tensor? token_id_T, "
      "Tensor? slot_L, Tensor(c!)? slot_idx_TK, int num_threads) -> ()");

  m.def(
      "draw(Tensor logits_XV, Tensor row_Y, Tensor temperature_Y, Tensor min_p_Y, Tensor top_k_Y, Tensor top_p_Y, "
      "Tensor u_Y, Tensor(a!) token_Y, int num_threads) -> ()");
  m.def("largest(Tensor logits_XV, Tensor(a!) token_X, int num_threads) -> ()");
  m.def("mask_tokens(Tensor(a!) logits_XV, Tensor bits_YB, Tensor row_Y, int num_threads) -> ()");
  m.def("rms_norm(Tensor x_TH, Tensor weight_H, float eps, Tensor(a!) out_TH, int num_threads) -> ()");
  m.def(
      "add_rms_norm(Tensor x_TH, Tensor residual_TH, Tensor weight_H, float eps, Tensor(a!) out_TH, Tensor(b!) sum_TH, "
      "int num_threads) -> ()");
  m.def("silu_mul(Tensor x_TI2, Tensor(a!) out_TI, float limit, int num_threads) -> ()");
  // The following return the first row or request that reaches outside a tensor (nothing is computed then), or -1.
  m.def(
      "rope(Tensor x_TNR, Tensor cos_sin_PR, Tensor position_T, bool interleaved, Tensor(a!) out_TNR, int num_threads) "
      "-> int");
  m.def("cache_insert(Tensor(a!) kv_pages, Tensor kv_slot_T, Tensor kv_TD, int num_threads) -> int");
  m.def(
      "latent_insert(Tensor(a!) kv_pages, Tensor kv_slot_T, Tensor kv_TD, Tensor norm_weight_L, float eps, "
      "Tensor cos_sin_PR, Tensor position_T, bool interleaved, int num_threads) -> int");
  m.def(
      "mla_decode(Tensor q_nope_BNC, Tensor q_rope_BNR, Tensor kv_pages, Tensor page_table_BP, Tensor seq_len_B, "
      "Tensor w_kv_b, float softmax_scale, Tensor? cos_sin_PR, Tensor? position_B, bool interleaved, "
      "Tensor(a!) out_BNV, int num_threads) -> int");
  m.def(
      "mla_extend(Tensor q_nope_TNC, Tensor q_rope_TNR, Tensor kv_pages, Tensor page_table_BP, Tensor seq_len_B, "
      "Tensor query_start_B1, Tensor w_kv_b, float softmax_scale, Tensor(a!) out_TNV, int num_threads) -> int");
  m.def(
      "index_topk(Tensor query_TND, Tensor weight_TN, Tensor key_pages, Tensor page_table_BP, Tensor request_T, "
      "Tensor length_T, Tensor(a!) slot_TK, int num_threads) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(eprt, CPU, m) {
  m.impl("draw", TORCH_BOX(&draw));
  m.impl("largest", TORCH_BOX(&largest));
  m.impl("mask_tokens", TORCH_BOX(&mask_tokens));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("silu_mul", TORCH_BOX(&silu_mul));
  m.impl("rope", TORCH_BOX(&rope));
  m.impl("cache_insert", TORCH_BOX(&cache_insert));
  m.impl("latent_insert", TORCH_BOX(&latent_insert));
  m.impl("mla_decode", TORCH_BOX(&mla_decode));
  m.impl("mla_extend", TORCH_BOX(&mla_extend));
  m.impl("index_topk", TORCH_BOX(&index_topk));
}

STABLE_TORCH_LIBRARY_IMPL(eprt, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("cpu_isa_detected", TORCH_BOX(&cpu_isa_detected));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("emulate_amx", TORCH_BOX(&emulate_amx));
  m.impl("own_threads", TORCH_BOX(&own_threads));
  m.impl("grouped_experts", TORCH_BOX(&grouped_experts));
  m.impl("gate_topk", TORCH_BOX(&gate_topk));
}
