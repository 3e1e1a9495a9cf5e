// What `prepare` does: documents of text files into token shards that know their tokenizer.
//
// All is written into OUT.partial, which is renamed to OUT when it is complete, so that OUT is never half of something.
// What is on the disk is noted every few seconds in OUT.partial/state.json, from where the same call goes on. The files
// depend neither on that nor on the number of threads. After a document that is refused, too, the same call goes on
// where it was: a source may have been mended behind the documents that are encoded.
//
// OUT has a tokenizer_config.json, by which Tokenizer::read() finds the end-of-text token that was chosen.
//
// Each document is for training, or with the chance `val`, drawn by its content, for validation; the first one is for
// training. Where this leaves nothing for validation, because there are few documents, it gets the last `val` of the
// tokens. A document is encoded as encode_documents says.
#pragma once

#include <string>
#include <vector>

#include "engine/check.h"

namespace crossply {

struct PrepareOptions {
  std::vector<std::string> inputs;  // files, directories, patterns (data/paths.h); "-": standard input
  std::string out;
  std::string tokenizer;  // a tokenizer.json, or a directory with one; "": one of `vocab` tokens is trained
  int64_t vocab = 0;
  std::string style = "gpt2";  // of the trained one
  std::string eot;             // the token that ends a document; "": the tokenizer's own
  std::string field = "text";
  bool field_given = false;
  double val = 0.01;
  int64_t shard_tokens = 100'000'000;
};

// Exit::done, or Exit::stopped after a signal. Throws Exit::usage where OUT was begun or made with other flags or
// inputs, and what reading, encoding and writing throw.
Exit prepare(const PrepareOptions& options);

}  // namespace crossply
