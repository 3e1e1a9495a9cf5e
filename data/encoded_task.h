// A task in the tokens of a model that was trained on text, for fine-tuning it and for asking it.
//
// The samples are those of the task's own words, in the same order. Each becomes
//
//   the tokenizer's beginning of a text | question | solution | end of text         scored: solution and end of text
//
// Question and solution are encoded apart, as generation does it. The end is the tokenizer's end-of-text token; bytes
// have the byte 0. The judge decodes an answer and compares its words, so its tokens do not matter.
#pragma once

#include "data/task_source.h"

namespace crossply {

// options.of_model: the tokenizer, bytes or bpe. T is what the longest sample of both splits needs, or options.seq_len.
// Throws Exit::usage for a smaller one, and Exit::bad_data for a tokenizer that has no end-of-text token, or whose
// tokens do not give the task's text back.
Dataset encode_task(TaskSplits words, const DataOptions& options);

}  // namespace crossply
