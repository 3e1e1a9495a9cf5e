#include "data/document_shuffle.h"

#include "cli/ticker.h"
#include "data/document_marks.h"
#include "data/loader.h"
#include "engine/rng.h"

namespace crossply {

DocumentShuffle::DocumentShuffle(std::unique_ptr<Source> source, const std::string& mark, int64_t eot, uint64_t seed)
    : source_(std::move(source)), mark_(mark), eot_(eot), seed_(seed) {
  for (const int64_t tokens : source_->pieces()) piece_begins_.push_back(piece_begins_.back() + tokens);
  CHECK_THAT(size() > 0, "a split of ", tokens(), " tokens");
}

// A piece is of one file, so it begins a document.
void DocumentShuffle::find_in(size_t piece, bool before) const {
  const int64_t begin = piece_begins_[piece];
  starts_.push_back(begin);
  visit_beginnings(*source_, piece, {static_cast<int32_t>(eot_), before}, [&](int64_t place) {
    starts_.push_back(begin + place);
    return true;
  });
}

void DocumentShuffle::find_documents() const {
  if (!starts_.empty()) return;
  const bool before = begin_with_eot(mark_, first_token(*source_), eot_);
  Ticker ticker("finding documents", "million tokens");
  for (size_t piece = 0; piece + 1 < piece_begins_.size(); ++piece) {
    if (piece_begins_[piece] < piece_begins_[piece + 1]) find_in(piece, before);
    ticker.tell(std::max<int64_t>(1, piece_begins_[piece + 1] / 1'000'000), tokens() / 1'000'000);
  }
  if (starts_.size() < 2) {
    starts_.clear();
    fail(Exit::usage, "--shuffle documents: the training data is one document, because it does not have the token ",
         eot_, " that ends one; --eot has the right one, or leave out --shuffle");
  }
  starts_.push_back(tokens());
}

int64_t DocumentShuffle::documents() const {
  const std::lock_guard lock(reading_);
  find_documents();
  return std::ssize(starts_) - 1;
}

void DocumentShuffle::check_tokens(int64_t vocab) const {
  source_->check_tokens(vocab);
  documents();
}

int64_t DocumentShuffle::document_at(int64_t order, int64_t place) const {
  if (order == 0) return place;
  return permute(place, std::ssize(starts_) - 1,
                 random_bits(seed_, stream_of("documents"), static_cast<uint64_t>(order - 1)));
}

void DocumentShuffle::lay_out(int64_t order) const {
  find_documents();
  if (laid_out_ == order) return;
  ends_.resize(starts_.size() - 1);
  int64_t end = 0;
  for (size_t place = 0; place < ends_.size(); ++place) {
    const auto d = static_cast<size_t>(document_at(order, static_cast<int64_t>(place)));
    ends_[place] = end += starts_[d + 1] - starts_[d];
  }
  laid_out_ = order;
}

void DocumentShuffle::read_at(int64_t order, int64_t index, int32_t* tokens, int32_t* targets) const {
  CHECK_THAT(index >= 0 && index < size(), "window ", index, " of ", size());
  const std::lock_guard lock(reading_);
  lay_out(order);
  const int64_t T = seq_len();
  std::vector<int32_t> window(static_cast<size_t>(T + 1));
  int64_t at = index * T;
  auto place = std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin();
  for (int64_t done = 0; done <= T; ++place) {
    const int64_t left = ends_[static_cast<size_t>(place)] - at, n = std::min(left, T + 1 - done);
    const int64_t d = document_at(order, place);
    const int64_t length = starts_[static_cast<size_t>(d) + 1] - starts_[static_cast<size_t>(d)];
    read_document(d, length - left, n, window.data() + done);
    at += n, done += n;
  }
  copy_window(window.data(), Window{0, T, 0}, T, tokens, targets);
}

void DocumentShuffle::read_document(int64_t document, int64_t from, int64_t count, int32_t* out) const {
  const int64_t begin = starts_[static_cast<size_t>(document)] + from;
  const auto piece = std::upper_bound(piece_begins_.begin(), piece_begins_.end(), begin) - piece_begins_.begin() - 1;
  source_->read_piece(static_cast<size_t>(piece), begin - piece_begins_[static_cast<size_t>(piece)], count, out);
}

}  // namespace crossply
