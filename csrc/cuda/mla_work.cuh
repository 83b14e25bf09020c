// Who computes which part of a decode's attention: the step's schedule, and how a cluster walks through its share.
//
// A request's queries are rows (token, head), token after token; kGroupRows of them are a group, which one cluster of
// kCtas thread blocks computes, kRows by each. A unit is a group with the request's whole context. The units lie on a
// line, one after the other, each as long as it has blocks of kKeys positions plus a constant for its beginning and
// end. The line is cut into equal shares, one per cluster. A unit that is cut has partial results, added up afterwards.
#pragma once
#include "common.cuh"

namespace eprt {

constexpr int kRows = 64;     // of queries, per thread block
constexpr int kKeys = 64;     // positions of a block
constexpr int kLatent = 512;  // values of a cache entry that are the value as well as the key
constexpr int kEntry = 576;   // values of a cache entry
constexpr int kCtas = CTAS;   // thread blocks of a cluster, 1 or 2
constexpr int kGroupRows = kRows * kCtas;

// For a kernel that may start before the preceding one has ended: nothing that one wrote is read before this.
EPRT_DEVICE void await_preceding_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The following kernel may start, if it waits as above for what this one writes.
EPRT_DEVICE void start_following_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Where a share begins: in which group of which request, and at which block of its context.
struct Bound {
  int32_t request;
  int32_t group;
  int32_t block;
  int32_t unused;
};

EPRT_DEVICE bool same_unit(const Bound& a, const Bound& b) { return a.request == b.request && a.group == b.group; }

// What the kernels know of a step.
struct Lengths {
  const int32_t* length;       // [requests]: positions of each, its new tokens included
  const int32_t* query_start;  // [requests + 1]: first token of each; null: one token each
  int32_t requests;
  int32_t heads;
};

struct Request {
  int length, first_token, tokens;

  EPRT_DEVICE Request() {}
  EPRT_DEVICE Request(const Lengths& all, int i) : length(all.length[i]) {
    first_token = all.query_start ? all.query_start[i] : i;
    tokens = all.query_start ? all.query_start[i + 1] - first_token : 1;
  }

  EPRT_DEVICE int blocks() const { return ceil_div(length, kKeys); }
  EPRT_DEVICE int groups(int heads) const { return ceil_div(tokens * heads, kGroupRows); }
};

// A run of blocks of one unit.
struct Segment {
  Request request;
  int index;  // of the request
  int group;
  int begin, end;  // blocks

  EPRT_DEVICE bool whole() const { return begin == 0 && end == request.blocks(); }
};

// The segments of a share, one after the other.
struct Walk {
  const Lengths& all;
  Bound at, last;

  EPRT_DEVICE Walk(const Lengths& all, const Bound* bound, int share)
      : all(all), at(bound[share]), last(bound[share + 1]) {}

  // Whether there is another segment; `at` is behind it then.
  EPRT_DEVICE bool next(Segment& segment) {
    while (more()) {
      const Request request(all, at.request);
      if (at.group >= request.groups(all.heads)) {
        at = {at.request + 1, 0, 0, 0};
        continue;
      }
      const int end = same_unit(at, last) ? last.block : request.blocks();
      segment = {request, at.request, at.group, at.block, end};
      at = {at.request, at.group + 1, 0, 0};
      return true;
    }
    return false;
  }

 private:
  EPRT_DEVICE bool more() const {
    if (at.request >= all.requests || at.request > last.request) return false;
    if (at.request < last.request) return true;
    return at.group < last.group || (at.group == last.group && at.block < last.block);
  }
};

// Where the partial result of a segment lies. A share has at most two segments of cut units: one that it continues,
// one that it begins.
EPRT_DEVICE int partial_slot(int share, bool begins) { return 2 * share + begins; }

}  // namespace eprt
