// Where the end of a text was written before: in the text itself, or in a reference that it may copy from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace paceline {

using Found = std::pair<int64_t, int64_t>;  // (where the match ends in the source, its length in tokens); (0, 0): none

// Tokens that grow, and for each the one before it that ends the same pair of tokens: a text is looked at in every step,
// and to go through it once would push others out of the caches.
class Source {
 public:
  void push(int32_t token);
  void cut(size_t count);
  size_t size() const { return tokens_.size(); }
  const int32_t* tokens() const { return tokens_.data(); }
  // The latest end, at `stop` or before it, of a pair that may be (first, second); 0: none. Then `before` that one.
  int64_t latest(int32_t first, int32_t second, int64_t stop) const;
  int64_t before(int64_t end) const { return links_[end - 1]; }

 private:
  size_t place(int32_t first, int32_t second) const;
  void link(size_t end);

  std::vector<int32_t> tokens_;
  std::vector<int32_t> links_;  // of a pair that ends with this token, the end of the one before it; 0: none
  std::vector<int32_t> heads_;  // by hash of a pair: where its latest one ends; 0: nowhere
};

class Search {
 public:
  // `lengths` of a match that are told apart, rising from 2: a longer one counts as the longest of these that it reaches.
  Search(const std::vector<int32_t>& reference, std::vector<int64_t> lengths);

  Source& text() { return text_; }
  // The longest match that ends before the text's last token, or anywhere in the reference; the latest among equals.
  Found in_text() const { return longest(text_); }
  Found in_reference() const { return longest(reference_); }

 private:
  Found longest(const Source& source) const;
  int64_t stop(const Source& source) const;

  Source text_, reference_;
  std::vector<int64_t> lengths_;
};

}  // namespace paceline
