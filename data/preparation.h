// What `prepare` does: documents of text files into token shards that know their tokenizer.
//
// All is written into OUT.partial, which is renamed to OUT when it is complete, so that OUT is never half of something.
// What is on the disk is noted every few seconds in OUT.partial/state.json, from where the same call goes on. The files
// depend neither on that nor on the number of threads. After a document that is refused, too, the same call goes on
// where it was: a source may have been mended behind the documents that are encoded. Inputs behind those documents may
// be others, too, unless a vocabulary was trained on them. As long as nothing is encoded, everything may be different.
//
// state.json has a checksum, and digests of the sources that were read and of the tokens that were written.
// manifest.json lists the sources, and the documents that skip_bad left out.
//
// OUT has a tokenizer_config.json, by which Tokenizer::read() finds the end-of-text token that was chosen.
//
// Documents are encoded as encode_documents says, into OUT.partial/encoded_*.bin. When all are encoded, a share `val`
// of the tokens becomes the validation set, as data/validation_split.h says, and the rest the training set. So all
// tokens need their space twice. With val 0 nothing is split: what is encoded is the training set.
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
  // A special token's text within a document: token (it is the token), text (as any other), refuse.
  std::string special_tokens = "token";
  std::string field = "text";
  bool field_given = false;
  double val = 0.01;  // share of the tokens
  int64_t shard_tokens = 100'000'000;
  int64_t skip_bad = 0;  // at most so many documents that cannot be read as text are left out
};

// Exit::done, or Exit::stopped after a signal. Throws Exit::usage where OUT was begun or made with other flags or
// inputs, and what reading, encoding and writing throw.
Exit prepare(const PrepareOptions& options);

}  // namespace crossply
