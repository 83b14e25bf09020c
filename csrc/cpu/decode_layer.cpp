#include "cpu/decode_layer.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/ep_rows.h"
#include "cpu/gemm_loops.h"
#include "cpu/team.h"

namespace eprt {
namespace {

static_assert(kMostTopK <= ep::kMaxTopK && kMostExpertRows <= kRowsAtOnce);

// Fewer values than this the caller computes alone: the other threads would take longer to begin.
constexpr int64_t kParallelValues = 1 << 15;

int64_t value_bytes(Dtype type) { return type == Dtype::kFloat32 ? 4 : 2; }
const char* row_of(const Rows& x, int64_t row) {
  return static_cast<const char*>(x.data) + row * x.stride * value_bytes(x.dtype);
}
int team_for(int64_t values, int num_threads) { return values > kParallelValues ? num_threads : 1; }

// Two loops whose indices do not need each other, as one.
template <class First, class Second>
void parallel_for_both(int64_t first, int64_t second, int num_threads, First&& run_first, Second&& run_second) {
  parallel_for(first + second, num_threads, [&](int64_t i) { i < first ? run_first(i) : run_second(i - first); });
}

// ---- attention ------------------------------------------------------------------------------------------------------

struct AttendScratch {
  Scratch normed, qkv, q_latent, q, attended, output;
};
thread_local AttendScratch t_attend;

int64_t first_outside(const int64_t* index, int64_t n, int64_t limit) {
  for (int64_t i = 0; i < n; ++i) {
    if (index[i] < 0 || index[i] >= limit) return i;
  }
  return -1;
}

int64_t first_bad(const AttendDecodesArgs& args) {
  const CacheInsertArgs& entry = args.insert.entry;
  const int64_t bad_slot = first_outside(entry.slot, args.rows, entry.num_pages * entry.page_size);
  if (bad_slot >= 0) return bad_slot;
  const int64_t bad_position = first_outside(args.insert.position, args.rows, args.insert.num_positions);
  if (bad_position >= 0) return args.rows + bad_position;
  const int64_t bad_request = mla_first_bad_request(args.mla);
  return bad_request < 0 ? -1 : 2 * args.rows + bad_request;
}

void norm_rows(const Rows& x, int64_t rows, int64_t size, const NormWeight& norm, void* out, int num_threads) {
  rms_norm({.x = x.data,
            .x_row = x.stride,
            .residual = nullptr,
            .residual_row = 0,
            .weight = norm.data,
            .weight_type = norm.type,
            .sum = nullptr,
            .out = out,
            .type = x.dtype,
            .rows = rows,
            .size = size,
            .eps = norm.eps,
            .num_threads = num_threads});
}

// y of x's type, in memory of this thread.
Rows project(const Rows& x, int64_t rows, const Projection& by, Scratch& memory, int num_threads) {
  const Rows y{memory.reserve(rows * by.w.n * value_bytes(x.dtype)), x.dtype, by.w.n};
  linear(x, rows, by.w, by.bias, const_cast<void*>(y.data), num_threads);
  return y;
}

Rows behind(const Rows& x, int64_t column) {
  return {static_cast<const char*>(x.data) + column * value_bytes(x.dtype), x.dtype, x.stride};
}

Rows normed(const Rows& x, int64_t rows, int64_t size, const NormWeight& norm, Scratch& memory, int num_threads) {
  const Rows out{memory.reserve(rows * size * value_bytes(x.dtype)), x.dtype, size};
  norm_rows(x, rows, size, norm, const_cast<void*>(out.data), num_threads);
  return out;
}

void insert_entries(const AttendDecodesArgs& args, const Rows& kv) {
  LatentInsertArgs insert = args.insert;
  insert.entry.kv = kv.data;
  insert.entry.kv_row = kv.stride;
  insert.entry.kv_type = kv.dtype;
  insert.entry.rows = args.rows;
  insert.entry.num_threads = args.num_threads;
  latent_insert(insert);
}

// [rows, heads * value]. q: [rows, heads * (nope + rope)].
Rows attended(const AttendDecodesArgs& args, const Rows& q) {
  MlaArgs mla = args.mla;
  const int64_t head = mla.nope + mla.rope, bytes = value_bytes(q.dtype), width = mla.num_heads * mla.value;
  // Rotated keys lie behind what the heads give: both end with this call.
  char* memory = t_attend.attended.reserve(args.rows * (width + mla.num_heads * mla.rope) * bytes);
  char* rotated = memory + args.rows * width * bytes;
  rope({.x = behind(q, mla.nope).data,
        .x_row = q.stride,
        .x_head = head,
        .cos_sin = args.insert.cos_sin,
        .position = args.insert.position,
        .out = rotated,
        .type = q.dtype,
        .rows = args.rows,
        .heads = mla.num_heads,
        .size = mla.rope,
        .num_positions = args.insert.num_positions,
        .interleaved = args.insert.interleaved,
        .num_threads = args.num_threads});
  mla.q_nope = q.data;
  mla.q_nope_row = q.stride;
  mla.q_nope_head = head;
  mla.q_rope = rotated;
  mla.q_rope_row = mla.num_heads * mla.rope;
  mla.q_rope_head = mla.rope;
  mla.q_type = q.dtype;
  mla.out = memory;
  mla.num_threads = args.num_threads;
  mla_decode(mla);
  return {memory, q.dtype, width};
}

}  // namespace

int64_t attend_decodes(const AttendDecodesArgs& args) {
  const int64_t bad = first_bad(args);
  if (bad >= 0) return bad;
  const int64_t rows = args.rows, hidden = args.qkv_a.w.k, entry_size = args.insert.entry.size;
  const int threads = args.num_threads;
  AttendScratch& memory = t_attend;
  const Rows h = normed(args.x, rows, hidden, args.norm, memory.normed, threads);
  const Rows qkv = project(h, rows, args.qkv_a, memory.qkv, threads);
  Rows q = qkv;
  const int64_t q_size = args.qkv_a.w.n - entry_size;
  if (args.q_norm.data != nullptr) {
    q = normed(qkv, rows, q_size, args.q_norm, memory.q_latent, threads);
    q = project(q, rows, args.q_b, memory.q, threads);
  }
  insert_entries(args, behind(qkv, q_size));
  const Rows output = project(attended(args, q), rows, args.o, memory.output, threads);
  rms_norm({.x = output.data,
            .x_row = output.stride,
            .residual = args.x.data,
            .residual_row = args.x.stride,
            .weight = args.next_norm.data,
            .weight_type = args.next_norm.type,
            .sum = args.sum,
            .out = args.h,
            .type = args.x.dtype,
            .rows = rows,
            .size = hidden,
            .eps = args.next_norm.eps,
            .num_threads = threads});
  return -1;
}

// ---- experts --------------------------------------------------------------------------------------------------------

namespace {

struct MixScratch {
  Scratch wide, logits, gate_packed, shared_packed, shared_up, shared_inner, shared_inner_packed, shared_y;
  Scratch x, packed, inner, y;
  std::vector<float> weights;
  std::vector<int64_t> slot_idx, row, begin;
  std::vector<RowGroup> groups;
};
thread_local MixScratch t_mix;

// The rows that experts get: entry a = token * top_k + k is row[a], or -1 where no expert does; grouped by slot, inside
// a slot by a. False where a slot or its matrix does not exist.
bool place_rows(const MixDecodesArgs& args, MixScratch& s) {
  const int64_t entries = args.rows * args.rule.top_k;
  s.begin.assign(args.num_slots + 1, 0);
  for (int64_t a = 0; a < entries; ++a) {
    const int64_t slot = s.slot_idx[a];
    if (slot < -1 || slot >= args.num_slots) return false;
    if (slot < 0) continue;
    const int64_t matrix = args.matrix_of_slot[slot];
    if (matrix < 0 || matrix >= args.num_matrices) return false;
    ++s.begin[slot + 1];
  }
  s.groups.clear();
  for (int64_t slot = 0, row = 0; slot < args.num_slots; ++slot) {
    const int64_t count = s.begin[slot + 1];
    if (count > 0) s.groups.push_back({args.matrix_of_slot[slot], row, count, 0});
    args.load[slot] += count;
    s.begin[slot] = row;
    row += count;
  }
  s.row.resize(entries);
  for (int64_t a = 0; a < entries; ++a) s.row[a] = s.slot_idx[a] < 0 ? -1 : s.begin[s.slot_idx[a]]++;
  return true;
}

void choose_slots(const MixDecodesArgs& args, const float* logits, MixScratch& s) {
  const int64_t entries = args.rows * args.rule.top_k;
  s.weights.resize(entries);
  s.slot_idx.resize(entries);
  GateArgs rule = args.rule;
  rule.logits = logits;
  rule.rows = args.rows;
  rule.weights = s.weights.data();
  rule.slot_idx = s.slot_idx.data();
  gate_topk(rule, args.num_threads);
}

// As Tensor.to(float32): the gate's sums are those of fp32 rows.
Rows widened(const Rows& x, int64_t rows, int64_t size, Scratch& memory) {
  if (x.dtype == Dtype::kFloat32) return x;
  auto* out = reinterpret_cast<uint32_t*>(memory.reserve(rows * size * 4));
  for (int64_t r = 0; r < rows; ++r) {
    const auto* from = reinterpret_cast<const uint16_t*>(row_of(x, r));
    for (int64_t i = 0; i < size; ++i) out[r * size + i] = static_cast<uint32_t>(from[i]) << 16;
  }
  return {out, Dtype::kFloat32, size};
}

class MixDecodes {
 public:
  explicit MixDecodes(const MixDecodesArgs& args) : args_(args), s_(t_mix) {}

  MixedDecodes run() {
    const float* logits = score_and_share_up();
    choose_slots(args_, logits, s_);
    if (!place_rows(args_, s_)) return {-1, 0};
    gather_tokens();
    const int64_t begin_ns = ep::now_ns();
    multiply();
    const int64_t compute_ns = ep::now_ns() - begin_ns;
    sum_rows();
    return {num_tokens(), compute_ns};
  }

 private:
  int64_t hidden() const { return args_.gate.k; }
  int64_t row_bytes() const { return hidden() * value_bytes(args_.h.dtype); }
  bool has_shared() const { return args_.shared_w13.data != nullptr; }
  int64_t inner() const { return args_.shared_w2.k; }  // of the shared expert
  int64_t num_rows() const { return s_.groups.empty() ? 0 : s_.groups.back().row0 + s_.groups.back().rows; }

  int64_t num_tokens() const {
    const int64_t top_k = args_.rule.top_k;
    int64_t num = 0;
    for (int64_t token = 0; token < args_.rows; ++token) {
      const int64_t* slot = s_.slot_idx.data() + token * top_k;
      num += std::any_of(slot, slot + top_k, [](int64_t s) { return s >= 0; });
    }
    return num;
  }

  // The gate's logits, and gate and up of the shared expert beside them.
  const float* score_and_share_up() {
    const int64_t rows = args_.rows;
    const int threads = args_.num_threads;
    const Rows wide = widened(args_.h, rows, hidden(), s_.wide);
    char* logits = s_.logits.reserve(rows * args_.gate.n * 4);
    const LinearLoop gate(wide, rows, args_.gate, nullptr, logits, threads, s_.gate_packed);
    if (!has_shared()) {
      parallel_for(gate.num_packs(), gate.team(), [&](int64_t i) { gate.pack(i); });
      parallel_for(gate.num_pieces(), gate.team(), [&](int64_t i) { gate.multiply(i); });
      return reinterpret_cast<const float*>(logits);
    }
    char* up = s_.shared_up.reserve(rows * args_.shared_w13.n * value_bytes(args_.h.dtype));
    const LinearLoop shared(args_.h, rows, args_.shared_w13, nullptr, up, threads, s_.shared_packed);
    const int team = std::max(gate.team(), shared.team());
    parallel_for_both(
        gate.num_packs(), shared.num_packs(), team_for(rows * hidden(), team), [&](int64_t i) { gate.pack(i); },
        [&](int64_t i) { shared.pack(i); });
    parallel_for_both(
        gate.num_pieces(), shared.num_pieces(), team, [&](int64_t i) { gate.multiply(i); },
        [&](int64_t i) { shared.multiply(i); });
    return reinterpret_cast<const float*>(logits);
  }

  // silu(gate) * up of one row of the shared expert.
  void share_inner(int64_t row) {
    const int64_t bytes = value_bytes(args_.h.dtype);
    silu_mul({.x = s_.shared_up.reserve(0) + row * args_.shared_w13.n * bytes,
              .x_row = args_.shared_w13.n,
              .out = s_.shared_inner.reserve(0) + row * inner() * bytes,
              .type = args_.h.dtype,
              .rows = 1,
              .size = inner(),
              .limit = kNoLimit,
              .num_threads = 1});
  }

  // Each expert's rows behind each other, and the shared expert's inner rows beside that.
  void gather_tokens() {
    const int64_t entries = args_.rows * args_.rule.top_k, top_k = args_.rule.top_k;
    s_.x.reserve(std::max<int64_t>(num_rows(), 1) * row_bytes());
    const int64_t shared_rows = has_shared() ? args_.rows : 0;
    if (shared_rows > 0) s_.shared_inner.reserve(shared_rows * inner() * value_bytes(args_.h.dtype));
    const int64_t values = num_rows() * hidden() + shared_rows * inner();
    parallel_for_both(
        entries, shared_rows, team_for(values, args_.num_threads),
        [&](int64_t a) {
          if (s_.row[a] >= 0)
            std::memcpy(s_.x.reserve(0) + s_.row[a] * row_bytes(), row_of(args_.h, a / top_k), row_bytes());
        },
        [&](int64_t row) { share_inner(row); });
  }

  void multiply() {
    const int threads = args_.num_threads;
    const int64_t rows = num_rows();
    const Rows x{s_.x.reserve(0), args_.h.dtype, hidden()};
    void* y = s_.y.reserve(std::max<int64_t>(rows, 1) * row_bytes());
    const ExpertLoops experts(s_.groups, x, rows, args_.w13, args_.w2, y, threads, s_.packed, s_.inner);
    const int pack_team = team_for(rows * hidden(), threads);
    parallel_for(experts.num_packs(), pack_team, [&](int64_t i) { experts.pack(i); });
    parallel_for(experts.num_gate_ups(), experts.team(), [&](int64_t i) { experts.gate_up(i); });
    if (!has_shared()) {
      parallel_for(experts.num_requantizes(), pack_team, [&](int64_t i) { experts.requantize(i); });
      parallel_for(experts.num_downs(), experts.team(), [&](int64_t i) { experts.down(i); });
      return;
    }
    const Rows inner_rows{s_.shared_inner.reserve(0), args_.h.dtype, inner()};
    void* shared_y = s_.shared_y.reserve(args_.rows * row_bytes());
    const LinearLoop shared(inner_rows, args_.rows, args_.shared_w2, nullptr, shared_y, threads,
                            s_.shared_inner_packed);
    parallel_for_both(
        experts.num_requantizes(), shared.num_packs(), team_for(rows * args_.w2.k + args_.rows * inner(), threads),
        [&](int64_t i) { experts.requantize(i); }, [&](int64_t i) { shared.pack(i); });
    parallel_for_both(
        experts.num_downs(), shared.num_pieces(), std::max(experts.team(), shared.team()),
        [&](int64_t i) { experts.down(i); }, [&](int64_t i) { shared.multiply(i); });
  }

  // Each token's weighted sum over its experts, rounded, and then the shared expert's row added to it.
  void sum_rows() {
    const int64_t top_k = args_.rule.top_k;
    const ep::RowKernels& kernels = ep::row_kernels();
    const ep::Dtype type = args_.h.dtype == Dtype::kFloat32 ? ep::Dtype::kFloat32 : ep::Dtype::kBFloat16;
    const int64_t values = args_.rows * (top_k + 2) * hidden();
    parallel_for(args_.rows, team_for(values, args_.num_threads), [&](int64_t token) {
      ep::Term terms[ep::kMaxTopK];
      int num_terms = 0;
      for (int64_t a = token * top_k; a < (token + 1) * top_k; ++a) {
        if (s_.row[a] < 0) continue;
        terms[num_terms++] = {s_.y.reserve(0) + s_.row[a] * row_bytes(), s_.weights[a], type};
      }
      char* out = static_cast<char*>(args_.y) + token * row_bytes();
      const int size = static_cast<int>(hidden());
      kernels.weighted_sum(terms, num_terms, size, out, type);
      if (has_shared()) kernels.add(out, s_.shared_y.reserve(0) + token * row_bytes(), type, size, out);
    });
  }

  const MixDecodesArgs& args_;
  MixScratch& s_;
};

}  // namespace

MixedDecodes mix_decodes(const MixDecodesArgs& args) { return MixDecodes(args).run(); }

}  // namespace eprt
