#!/usr/bin/env python3
"""Writes which tokens Engram takes for the same (--engram-map), those whose texts differ in case, accents or white
space only, from a tokenizer.json, with the package tokenizers:

    python3 data/engram_map.py --tokenizer tokenizer.json --out engram_map.json

The file: {"map": [a number for each token], "size": how many numbers}. Numbers come in the order of the tokens. A token
that holds a piece of a character only is one of its own.
"""
import argparse
import json
import sys


def normalizer():
    """DeepSeek's: of NFKC forms without accents, in lower case, white space as one blank, none at the ends."""
    from tokenizers import Regex, normalizers

    blank = "\ue000"  # stands for a text that is a blank alone, which would be stripped
    return normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), blank), normalizers.Strip(),
        normalizers.Replace(blank, " ")])


def numbers(tokenizer, vocab):
    """A number for each of the tokens 0 .. vocab - 1, equal where they are the same."""
    rule, known = normalizer(), {}
    for token in range(vocab):
        name = tokenizer.id_to_token(token)
        text = tokenizer.decode([token], skip_special_tokens=False) if name is not None else ""
        if name is None:  # the model's table is larger than the tokenizer
            key = (token,)
        elif "\ufffd" in text:
            key = ("piece", name)
        else:
            key = rule.normalize_str(text) or text
        yield known.setdefault(key, len(known))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json")
    parser.add_argument("--vocab", type=int, default=0, help="V of the model, where it is more than the tokenizer's")
    parser.add_argument("--out", required=True, help="file to write")
    args = parser.parse_args()
    try:
        from tokenizers import Tokenizer
    except ImportError:
        sys.exit(f"{sys.executable} has no package tokenizers: pip install tokenizers")
    tokenizer = Tokenizer.from_file(args.tokenizer)
    own = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if 0 < args.vocab < own:
        sys.exit(f"--vocab {args.vocab}: the tokenizer has {own} tokens")
    found = list(numbers(tokenizer, args.vocab or own))
    size = max(found) + 1
    with open(args.out, "w", encoding="utf-8") as file:
        json.dump({"map": found, "size": size}, file)
        file.write("\n")
    print(f"{len(found)} tokens are {size} ({1 - size / len(found):.2%} fewer)")


if __name__ == "__main__":
    main()
