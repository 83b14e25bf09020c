#include "cpu/paged_rows.h"

#include <cstring>

namespace eprt {
namespace {

int64_t row_of(const PagedRows& rows, int64_t i) { return rows.row == nullptr ? i : rows.row[i]; }

bool is_beyond(const PagedRows& rows, int64_t i) { return row_of(rows, i) >= rows.num_pages * rows.page_rows; }

}  // namespace

int64_t copy_paged_rows(const PagedRows& to, const PagedRows& from, int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i) {
    if (is_beyond(to, i) || is_beyond(from, i)) return i;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (row_of(to, i) >= 0 && row_of(from, i) >= 0) std::memcpy(to.at(i), from.at(i), bytes);
  }
  return -1;
}

}  // namespace eprt
