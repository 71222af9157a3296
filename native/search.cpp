#include "search.h"

#include <algorithm>

namespace paceline {

// Tokens, `most` at most, for which the source before `end` is the end of the text.
int64_t Search::shared(const std::vector<int32_t>& source, int64_t end, int64_t most) const {
  const int32_t* ours = text_.data() + text_.size();
  const int32_t* theirs = source.data() + end;
  int64_t n = 0;
  while (n < most && theirs[-1 - n] == ours[-1 - n]) ++n;
  return n;
}

Found Search::longest(const std::vector<int32_t>& source, int64_t stop) const {
  Found best{0, 0};
  if (text_.empty()) return best;
  const int64_t most = std::min<int64_t>(lengths_.back(), text_.size());
  const int32_t last = text_.back();
  const int32_t* tokens = source.data();
  size_t reached = 0;  // of `lengths_`
  for (int64_t end = stop, wanted = lengths_.front(); end >= wanted; --end) {
    if (tokens[end - 1] != last) continue;
    const int64_t same = shared(source, end, std::min(most, end));
    if (same < wanted) continue;
    while (reached < lengths_.size() && same >= lengths_[reached]) ++reached;
    best = {end, lengths_[reached - 1]};
    if (reached == lengths_.size()) break;
    wanted = lengths_[reached];
  }
  return best;
}

bool Search::finds(bool reference) const {
  const std::vector<int32_t>& source = reference ? reference_ : text_;
  const int64_t least = lengths_.front(), text = text_.size();
  if (text < least) return false;
  for (int64_t end = reference ? static_cast<int64_t>(source.size()) : text - 1; end >= least; --end)
    if (source[end - 1] == text_.back() && shared(source, end, least) == least) return true;
  return false;
}

}  // namespace paceline
