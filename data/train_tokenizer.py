#!/usr/bin/env python3
"""Trains a byte-level BPE vocabulary on the text on standard input, with the package tokenizers, and writes it as
tokenizer.json. `prepare --vocab N` runs it; alone:

    cat corpus/*.txt | python3 data/train_tokenizer.py --vocab 8192 --out tokenizer.json

--style gpt2: GPT-2's cuts and its <|endoftext|>; llama3: Llama 3's cuts (numbers by three digits) and its
<|begin_of_text|> and <|end_of_text|>, of which the first begins each text.
"""
import sys

# `prepare` gives this text to `python3 -c`, which looks for modules in the current directory first: a tokenizers.py or
# an argparse.py of somebody's data is not what is meant.
sys.path[:] = [place for place in sys.path if place != ""]

import argparse
import io

LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def pieces(stream, size=1 << 20):
    """The text in pieces of about so many characters that end where a line does."""
    rest = ""
    while block := stream.read(size):
        rest += block
        end = rest.rfind("\n") + 1
        if end > 0:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, required=True, help="tokens, the 256 bytes and special ones included")
    parser.add_argument("--style", choices=["gpt2", "llama3"], default="gpt2")
    parser.add_argument("--out", required=True, help="file to write")
    args = parser.parse_args()
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    except ImportError:
        print(f"{sys.executable} has no package tokenizers: pip install tokenizers", file=sys.stderr)
        sys.exit(3)  # `prepare` knows this one

    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>"] if args.style == "gpt2" else ["<|begin_of_text|>", "<|end_of_text|>"]
    if args.style == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=args.vocab, special_tokens=special, show_progress=sys.stderr.isatty(),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    text = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", newline="")
    tokenizer.train_from_iterator(pieces(text), trainer)
    if args.style == "llama3":
        bos = special[0]
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B",
                                          special_tokens=[(bos, tokenizer.token_to_id(bos))])])
    tokenizer.save(args.out)


main()
