#include "cpu/paged_rows.h"

#include <cstring>

namespace eprt {
namespace {

bool has_row(const PagedRows& rows, int64_t i) {
  const int64_t row = rows.row == nullptr ? i : rows.row[i];
  return row >= 0 && row < rows.num_pages * rows.page_rows;
}

}  // namespace

int64_t copy_paged_rows(const PagedRows& to, const PagedRows& from, int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i) {
    if (!has_row(to, i) || !has_row(from, i)) return i;
  }
  for (int64_t i = 0; i < count; ++i) std::memcpy(to.at(i), from.at(i), bytes);
  return -1;
}

}  // namespace eprt
