// What a tokenizer.json does with a text between its added tokens and its vocabulary: the pre-tokenizer's steps, each
// of which cuts every piece of the step before it.
#pragma once

#include <array>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "data/bpe/regex.h"

namespace crossply {

// Goes through the matches of a regular expression in a text.
class MatchScan {
 public:
  // classes: of the text, by the same expression. The scan begins at a place that it counts in characters and in bytes.
  // What it holds by reference must live on.
  MatchScan(const Regex& regex, std::string_view text, std::string_view classes, size_t character, size_t byte)
      : end_character(character), end_byte(byte), regex_(&regex), text_(text), classes_(classes) {}
  // To the next match; false if there is none. more: see Regex::find. What follows depends on the end of this match
  // alone, if that is not empty and the expression does not look behind.
  bool next(bool more = false);
  bool is_empty() const { return end_byte == begin_byte; }

  size_t begin_byte = 0, end_character, end_byte;  // of the match

 private:
  size_t bytes_to(size_t from_byte, size_t from, size_t to) const;
  const Regex* regex_;
  std::string_view text_, classes_;
  bool matched_ = false;
};

class Splitter {
 public:
  Splitter() = default;
  // Throws Exit::bad_data, with the path, for a regular expression that is none, or not understood.
  Splitter(const nlohmann::json& pre_tokenizer, const std::string& path);
  // What of a pre-tokenizer is not computed here, in words; "" if all of it is.
  static std::string foreign_part(const nlohmann::json& pre_tokenizer);
  // Is its last step ByteLevel?
  static bool is_byte_level(const nlohmann::json& pre_tokenizer);

  // Is the begin of a text cut otherwise than the same in mid-text?
  bool knows_begin() const;
  // All that decides the pieces, in words.
  std::string normal_form() const;

  // Calls emit(piece) for every piece that is not empty, in order; a piece is valid during that call. first: does the
  // text begin here?
  template <class Emit>
  void split(std::string_view text, bool first, Emit&& emit) const {
    split_from(0, text, first, emit);
  }
  // The first step, if it cuts around the matches of this expression; the pieces are then those of split_rest of each
  // match and of what is between two, so that a text may be scanned from several places of it. Otherwise null.
  const Regex* scanned() const {
    return !steps_.empty() && steps_[0].kind == Kind::cut && steps_[0].behavior == Behavior::isolated ? &steps_[0].regex
                                                                                                      : nullptr;
  }
  template <class Emit>
  void split_rest(std::string_view piece, bool first, Emit&& emit) const {
    if (!piece.empty()) split_from(1, piece, first, emit);
  }

 private:
  enum class Kind { cut, change };
  enum class Behavior { isolated, removed, with_previous, with_next, contiguous };
  enum class Prepend { always, first, never };
  struct Step {
    Kind kind = Kind::cut;
    Regex regex;  // cut: around its matches, or, inverted, around what is between them
    Behavior behavior = Behavior::isolated;
    bool invert = false;
    // cut: the expression. change: what stands for a space, and is put before a text that does not begin with it.
    std::string text;
    Prepend prepend = Prepend::never;
  };
  static constexpr size_t max_steps = 16;
  static std::string foreign_step(const nlohmann::json& step);
  void add(const nlohmann::json& step, const std::string& path);
  static std::string changed(const Step& step, std::string_view text, bool first);

  template <class Emit>
  void split_from(size_t step, std::string_view text, bool first, Emit& emit) const {
    if (step == steps_.size()) return emit(text);
    if (steps_[step].kind == Kind::cut) return cut(step, text, first, emit);
    const std::string copy = changed(steps_[step], text, first);
    split_from(step + 1, copy, first, emit);
  }

  template <class Emit>
  void cut(size_t index, std::string_view text, bool first, Emit& emit) const {
    thread_local std::array<std::string, max_steps> buffers;
    const Step& step = steps_[index];
    std::string& classes = buffers[index];
    step.regex.classify(text, classes);
    size_t begin = 0, end = 0;  // of the piece that may still grow
    bool before = false;        // was it a match?
    const auto add_piece = [&](size_t from, size_t to, bool match) {
      match = match != step.invert;
      const bool joins = (step.behavior == Behavior::contiguous && match == before) ||
                         (step.behavior == Behavior::with_previous && match && !before) ||
                         (step.behavior == Behavior::with_next && !match && before);
      if (!joins || from == 0) {
        if (begin < end) split_from(index + 1, text.substr(begin, end - begin), first && begin == 0, emit);
        begin = from;
      }
      end = to;
      before = match;
      if (step.behavior == Behavior::removed && match) begin = to;
    };
    MatchScan scan(step.regex, text, classes, 0, 0);
    size_t done = 0;
    for (; scan.next(); done = scan.end_byte) {
      if (done < scan.begin_byte) add_piece(done, scan.begin_byte, false);
      add_piece(scan.begin_byte, scan.end_byte, true);
    }
    if (done < text.size()) add_piece(done, text.size(), false);
    if (begin < end) split_from(index + 1, text.substr(begin, end - begin), first && begin == 0, emit);
    if (classes.capacity() > (1 << 20)) std::string().swap(classes);
  }

  std::vector<Step> steps_;
};

}  // namespace crossply
