// Trees of drafts: a sequence has further slots, one for each branch beside the first, with pages of their own from the
// page on that is not whole yet. What a row stores goes to the places of all branches that hold it.
#include <algorithm>
#include <cstring>

#include "program.h"

namespace paceline {

// For the next run only. `further`: a row, and a slot beside its own that holds it; `copies`: the slot that a page is
// copied from, the slot that it is copied to, and the page's index in both.
void Program::branch(std::vector<Further> further, std::vector<Copy> copies) {
  further_ = std::move(further);
  copies_ = std::move(copies);
  std::sort(further_.begin(), further_.end());
}

bool Program::check_branches(const Rows& rows) const {
  for (const Layer& layer : layers_) {
    const auto known = [&](int32_t slot) { return slot >= 0 && slot < layer.k.slots; };
    for (const auto& [row, slot] : further_)
      if (row < 0 || row >= rows.count || !known(slot)) return false;
    for (const auto& [from, to, page] : copies_) {
      if (!known(from) || !known(to) || page < 0 || page >= layer.k.table_stride) return false;
      for (int32_t slot : {from, to}) {
        const int64_t at = layer.k.table[slot * layer.k.table_stride + page];
        if (at < 0 || (at + 1) * layer.k.page_size > layer.k.tokens) return false;
      }
    }
  }
  return true;
}

void Program::copy_pages() {
  for (const Layer& layer : layers_)
    for (int part = 0; part < (layer.v.pool == layer.k.pool ? 1 : 2); ++part) {  // one where the keys hold the values
      const Pages& pages = part ? layer.v : layer.k;
      for (const auto& [from, to, page] : copies_) {
        const int64_t size = pages.page_size * pages.place_bytes();
        const auto at = [&](int32_t slot) {
          return static_cast<char*>(pages.pool) + pages.table[slot * pages.table_stride + page] * size;
        };
        std::memcpy(at(to), at(from), size);
      }
    }
}

void Program::store(const Op& op, int64_t row) {
  store_at(op, row, rows_.slots[row]);
  for (auto f = std::lower_bound(further_.begin(), further_.end(), Further{row, INT32_MIN});
       f != further_.end() && f->first == row; ++f)
    store_at(op, row, f->second);
}

}  // namespace paceline
