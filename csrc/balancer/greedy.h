// What greedy choices need: items ordered by weight, and heaps whose first item is changed in place.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace eprt::balancer {

template <typename Number>
struct Weighed {
  Number weight;
  int index;
};

// The order of items with a weight and an index: among equal weights the smaller index comes first. Without branches,
// which would be mispredicted every other time.
template <typename Item>
bool heavier(const Item& a, const Item& b) {
  return (a.weight > b.weight) | ((a.weight == b.weight) & (a.index < b.index));
}
template <typename Item>
bool lighter(const Item& a, const Item& b) {
  return (a.weight < b.weight) | ((a.weight == b.weight) & (a.index < b.index));
}

// Puts items that are nearly in order into order: the heaviest first; among equals the earlier.
template <typename Number>
void insert_heaviest_first(const std::vector<Number>& weight_N, std::vector<int>& order) {
  for (size_t i = 1; i < order.size(); i++) {
    const Weighed<Number> item{weight_N[order[i]], order[i]};
    size_t at = i;
    for (; at > 0 && heavier(item, {weight_N[order[at - 1]], order[at - 1]}); at--) order[at] = order[at - 1];
    order[at] = item.index;
  }
}

// All items in order. A radix sort by fp32 bits, whose order is that of the numbers, and insertions where fp32 cannot
// tell: comparisons that nobody can predict took most of a plan's time.
template <typename Number>
std::vector<int> heaviest_first(const std::vector<Number>& weight_N) {
  constexpr int kDigits = 4, kValues = 256;
  const int num_items = static_cast<int>(weight_N.size());
  std::vector<uint32_t> key_N(num_items);
  int first[kDigits][kValues] = {};  // of each digit's value: the number of items, then where the first one goes
  for (int item = 0; item < num_items; item++) {
    key_N[item] = ~std::bit_cast<uint32_t>(static_cast<float>(weight_N[item]));
    for (int digit = 0; digit < kDigits; digit++) first[digit][key_N[item] >> 8 * digit & 255]++;
  }
  std::vector<int> order(num_items), next(num_items);
  std::iota(order.begin(), order.end(), 0);
  for (int digit = 0; digit < kDigits; digit++) {
    int sum = 0;
    for (int& count : first[digit]) sum += std::exchange(count, sum);
    for (int item : order) next[first[digit][key_N[item] >> 8 * digit & 255]++] = item;
    order.swap(next);
  }
  insert_heaviest_first(weight_N, order);
  return order;
}

// Restores the heap after its first item has changed. before(a, b): a is nearer to the top.
template <typename Item, typename Before>
void sink_first(std::vector<Item>& heap, const Before& before) {
  const Item item = heap[0];
  size_t at = 0;
  for (size_t child; (child = 2 * at + 1) < heap.size(); at = child) {
    if (child + 1 < heap.size()) child += before(heap[child + 1], heap[child]);
    if (!before(heap[child], item)) break;
    heap[at] = heap[child];
  }
  heap[at] = item;
}

// The same after the first item was taken away.
template <typename Item, typename Before>
void drop_first(std::vector<Item>& heap, const Before& before) {
  heap[0] = heap.back();
  heap.pop_back();
  if (!heap.empty()) sink_first(heap, before);
}

}  // namespace eprt::balancer
