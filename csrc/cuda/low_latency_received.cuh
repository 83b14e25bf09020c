// What a dispatch receives: the counts of all sources, and a part of a message as a warp has it in its registers.
#pragma once
#include "low_latency_dispatch.cuh"
#include "low_latency_layered.cuh"

namespace eprt::low_latency {

struct Placement {       // in shared memory
  int num_slots;         // L
  int words;             // W: 32-bit words with a bit per token of a source
  EPRT_WIRED(int more;)  // node_words, which follow in `counted`
  int32_t* counted;      // [R][L + W]: a slot's rows from earlier sources; then which tokens come from the source
  int32_t* slot_begin;   // [L + 1]: first row of a slot
  int32_t* slot_rows;    // [L]

  EPRT_DEVICE Placement(const Context& c, uint8_t* smem)
      : num_slots(c.num_slots),
        words(ceil_div(c.max_tokens, 32)),
        EPRT_WIRED(more(node_words(c)), ) counted(reinterpret_cast<int32_t*>(smem)),
        slot_begin(counted + kRanks * (num_slots + words EPRT_WIRED(+more))),
        slot_rows(slot_begin + num_slots + 1) {}
  EPRT_DEVICE int32_t* begin(int source) const { return counted + source * (num_slots + words EPRT_WIRED(+more)); }
  EPRT_DEVICE uint32_t* tokens(int source) const { return reinterpret_cast<uint32_t*>(begin(source) + num_slots); }
  EPRT_DEVICE bool comes(int source, int token) const { return (tokens(source)[token / 32] >> (token % 32)) & 1; }
#ifdef NODE_RANKS
  // LAYERED: which tokens of the source come to this node, and who hands them on.
  EPRT_DEVICE uint32_t* node_tokens(int source) const { return tokens(source) + words; }
  EPRT_DEVICE int hander(int source) const { return int(node_tokens(source)[words]); }
#endif
  // How many tokens before `end` come from the source.
  EPRT_DEVICE int count_tokens(int source, int end) const {
    const uint32_t* bits = tokens(source);
    int n = end % 32 ? __popc(bits[end / 32] & ((1u << (end % 32)) - 1)) : 0;
#pragma unroll 1
    for (int i = 0; i < end / 32; ++i) n += __popc(bits[i]);
    return n;
  }
};

// A part of a message, as a warp has it in its registers: some lines of values, and the whole header.
constexpr int kPartChunks = 1;
constexpr int kPartQuads = kPartChunks * kChunkLines / kWarpLines;
constexpr int kPartScales = kPartChunks * kChunkScales;
constexpr int kParts = ceil_div(kPayloadLines, kPartChunks* kChunkLines);
static_assert(kPartScales <= kWarp, "a lane has at most one scale");

struct MessagePart {
  Vec16 v[kPartQuads + 1] = {};               // values; last, the header
  uint32_t missing = (2u << kPartQuads) - 1;  // a bit for each of v

  // Whether all of it is there; the same in all lanes.
  EPRT_DEVICE bool look(const uint8_t* message, int part, uint32_t epoch, int lane) {
    const auto line = [&](int i) {  // past the end of the message, the last line again
      const int value = min((part * kPartQuads + i) * kWarpLines + lane / kLineLanes, kPayloadLines - 1);
      const int at = i == kPartQuads ? min(lane / kLineLanes, kHeaderLines - 1) : kHeaderLines + value;
      return message + at * kLineBytes + lane % kLineLanes * 16;
    };
    return !look_for_lines(v, missing, line, epoch, lane);
  }
  // The epoch in a line that is missing.
  EPRT_DEVICE uint32_t seen(int lane) const {
    uint32_t epoch = 0;
#pragma unroll
    for (int i = 0; i <= kPartQuads; ++i)
      if ((missing >> i) & 1) epoch = v[i].w[3];
    const uint32_t lanes = __ballot_sync(kAllLanes, missing && ends_line(lane));
    return __shfl_sync(kAllLanes, epoch, __ffs(lanes) - 1);
  }
  EPRT_DEVICE const Vec16& header() const { return v[kPartQuads]; }
  // Of entry `lane` < K.
  EPRT_DEVICE int slot(int lane) const { return int(of_entry(header().w[0], header().w[2], lane)); }
  EPRT_DEVICE float weight(int lane) const { return __uint_as_float(of_entry(header().w[1], header().w[3], lane)); }
  EPRT_DEVICE int combine_row() const { return int(__shfl_sync(kAllLanes, header().w[0], kLineVectors)); }
};

// Waits until a part of a message is there; false if its source is masked or late. The same result in all lanes: all of
// them are needed for what follows.
EPRT_DEVICE bool wait_part(const Context& c, WaitBook* book, const uint8_t* message, int part, uint32_t epoch,
                           int source, int lane, MessagePart& to) {
  if (to.look(message, part, epoch, lane)) return true;
  const uint64_t start = global_timer_ns();
  for (int look = 1;; ++look) {
    const uint64_t now = global_timer_ns();  // before the look, see WaitEnd
    const bool there = to.look(message, part, epoch, lane);
    if (!there && look % 64) continue;
    const uint32_t seen = there ? epoch : to.seen(lane);
    const PeerState state = judge_peer(c.deadline, book, source, there, start, now, kDispatchTokens, seen, epoch);
    if (state != kAwaited) return there;
  }
}

}  // namespace eprt::low_latency
