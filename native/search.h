// Where the end of a text was written before: in the text itself, or in a reference that it may copy from.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace paceline {

using Found = std::pair<int64_t, int64_t>;  // (where the match ends in the source, its length in tokens); (0, 0): none

class Search {
 public:
  // `lengths` of a match that are told apart, rising: a longer one counts as the longest of these that it reaches.
  Search(std::vector<int32_t> reference, std::vector<int64_t> lengths)
      : reference_(std::move(reference)), lengths_(std::move(lengths)) {}

  std::vector<int32_t>& text() { return text_; }
  // The longest match that ends before the text's last token, or anywhere in the reference; the latest among equals.
  Found in_text() const { return longest(text_, static_cast<int64_t>(text_.size()) - 1); }
  Found in_reference() const { return longest(reference_, static_cast<int64_t>(reference_.size())); }
  // Whether there is a match at all.
  bool finds(bool reference) const;

 private:
  Found longest(const std::vector<int32_t>& source, int64_t stop) const;
  int64_t shared(const std::vector<int32_t>& source, int64_t end, int64_t most) const;

  std::vector<int32_t> text_, reference_;
  std::vector<int64_t> lengths_;
};

}  // namespace paceline
