// prepare: text into token shards that know their tokenizer, once, for `--data OUT` of every trainer.
#include "cli/needs.h"
#include "cli/program.h"
#include "data/preparation.h"

using namespace crossply;

int main(int argc, char** argv) {
  CommandLine app(
      "Encodes text into token shards, for training and for validation, beside their tokenizer. Inputs are text files, "
      "JSON lines, either packed by gzip or zstd, Parquet (by Python with pyarrow), directories of them, patterns, or "
      "- "
      "for standard input. Stopped, it goes on where it was when it is started again with the same flags.",
      "prepare");
  PrepareOptions o;
  auto flags = [&] {
    add_texts(app, "input", o.inputs, "...", "file, directory, pattern, or -").required().take_all();
    add_text(app, "--out", o.out, "DIR", "directory to make: train_*.bin, val_*.bin, tokenizer.json, manifest.json")
        .required();
    const Flag given = add_text(app, "--tokenizer", o.tokenizer, "FILE", "tokenizer.json, or a directory that has one");
    add_integer(app, "--vocab", o.vocab, 260, 1 << 20,
                "instead of --tokenizer: train one of so many tokens on the text (needs Python with the package "
                "tokenizers)")
        .excludes(given)
        .default_str("");
    needs(app, add_choice(app, "--style", o.style, {"gpt2", "llama3"}, "of --vocab: whose cuts and special tokens"),
          {{"--vocab"}});
    add_text(app, "--eot", o.eot, "TOKEN",
             "ends each document, and what a model of the data writes (default: the tokenizer's end-of-text token)");
    add_choice(
        app, "--special-tokens", o.special_tokens, {"token", "text", "refuse"},
        "what the text of a special token within a document becomes: that token, text like any other, or an error");
    add_text(app, "--field", o.field, "NAME", "of JSON lines, the field with the text; of Parquet, the column");
    add_number(app, "--val", o.val, 0, 0.5,
               "share of the tokens for validation: whole documents, or, if they are few or very unequal, the end of "
               "each file");
    add_integer(app, "--shard-tokens", o.shard_tokens, 1 << 16, std::numeric_limits<int32_t>::max(),
                "tokens of a file");
    add_integer(
        app, "--skip-bad", o.skip_bad, 0, 10'000,
        "leave out at most so many documents that are damaged (no JSON, no UTF-8, another format); manifest.json "
        "lists them");
  };
  return run_program(app, argc, argv, flags, [&] {
    o.field_given = is_given(app, "--field");
    return prepare(o);
  });
}
