#include "search.h"

#include <algorithm>

namespace paceline {

size_t Source::place(int32_t first, int32_t second) const {
  const uint64_t pair = static_cast<uint64_t>(static_cast<uint32_t>(first)) << 32 | static_cast<uint32_t>(second);
  return (pair * 0x9e3779b97f4a7c15u >> 32) & (heads_.size() - 1);
}

void Source::link(size_t end) {
  int32_t& head = heads_[place(tokens_[end - 2], tokens_[end - 1])];
  links_[end - 1] = head;
  head = static_cast<int32_t>(end);
}

void Source::push(int32_t token) {
  tokens_.push_back(token);
  links_.push_back(0);
  if (tokens_.size() > heads_.size()) {
    heads_.assign(std::max<size_t>(2 * heads_.size(), 1024), 0);
    for (size_t end = 2; end < tokens_.size(); ++end) link(end);
  }
  if (tokens_.size() > 1) link(tokens_.size());
}

void Source::cut(size_t count) {
  tokens_.resize(count);
  links_.resize(count);
  std::fill(heads_.begin(), heads_.end(), 0);
  for (size_t end = 2; end <= count; ++end) link(end);
}

int64_t Source::latest(int32_t first, int32_t second, int64_t stop) const {
  int64_t end = heads_.empty() ? 0 : heads_[place(first, second)];
  while (end > stop) end = before(end);
  return end;
}

Search::Search(const std::vector<int32_t>& reference, std::vector<int64_t> lengths) : lengths_(std::move(lengths)) {
  for (int32_t token : reference) reference_.push(token);
}

// The last token at which a match may end.
int64_t Search::stop(const Source& source) const {
  return static_cast<int64_t>(source.size()) - (&source == &text_);
}

Found Search::longest(const Source& source) const {
  Found best{0, 0};
  const int64_t count = static_cast<int64_t>(text_.size());
  if (count < 2) return best;
  const int32_t* ours = text_.tokens() + count;
  size_t reached = 0;  // of `lengths_`
  for (int64_t end = source.latest(ours[-2], ours[-1], stop(source)); end > 0 && reached < lengths_.size();
       end = source.before(end)) {
    const int32_t* theirs = source.tokens() + end;
    const int64_t most = std::min({lengths_.back(), count, end});
    int64_t same = 0;
    while (same < most && theirs[-1 - same] == ours[-1 - same]) ++same;
    if (same < lengths_[reached]) continue;
    while (reached < lengths_.size() && same >= lengths_[reached]) ++reached;
    best = {end, lengths_[reached - 1]};
  }
  return best;
}

}  // namespace paceline
