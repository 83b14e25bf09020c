// Rows copied from one tensor to another, each of pages that may lie apart.
#pragma once

#include <cstdint>

namespace eprt {

struct PagedRows {
  char* data;
  int64_t num_pages, page_rows;
  int64_t page_bytes;  // from page to page
  int64_t row_bytes;   // from row to row of a page
  const int64_t* row;  // which row each copied one is, page * page_rows + place in the page; null: 0, 1, 2, ...

  char* at(int64_t i) const {
    const int64_t r = row == nullptr ? i : row[i];
    return page_rows == 1 ? data + r * page_bytes : data + r / page_rows * page_bytes + r % page_rows * row_bytes;
  }
};

// Copies `count` rows of `bytes` each, but those of which one number is negative. Returns the first that lies behind
// the end of one of both (nothing is copied then), or -1.
int64_t copy_paged_rows(const PagedRows& to, const PagedRows& from, int64_t count, int64_t bytes);

}  // namespace eprt
