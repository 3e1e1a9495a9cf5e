#!/usr/bin/env python3
"""Writes data/bpe/unicode_table.cpp: the general categories of all characters, as the tokenizers package knows them.

  dev/unicode_table.py >data/bpe/unicode_table.cpp

They are asked of the package's own regular expressions, so that the text is split here as it is there, whatever version
of Unicode a regex library of this machine was built with.
"""
import itertools

from tokenizers import Regex, pre_tokenizers

NAMES = ["Cc", "Cf", "Cn", "Co", "Cs", "Ll", "Lm", "Lo", "Lt", "Lu", "Mc", "Me", "Mn", "Nd", "Nl", "No",
         "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "Sc", "Sk", "Sm", "So", "Zl", "Zp", "Zs"]
SURROGATES = range(0xD800, 0xE000)
CHARACTERS = [chr(code) for code in range(0x110000) if code not in SURROGATES]


def category_of():
  found = {code: NAMES.index("Cs") for code in SURROGATES}
  for index, name in enumerate(NAMES):
    keep = pre_tokenizers.Split(Regex(rf"\P{{{name}}}"), "removed")
    for first in range(0, len(CHARACTERS), 4096):
      for piece, _ in keep.pre_tokenize_str("".join(CHARACTERS[first:first + 4096])):
        for character in piece:
          assert ord(character) not in found, f"U+{ord(character):04X} has two categories"
          found[ord(character)] = index
  assert len(found) == 0x110000, "a character has no category"
  return [found[code] for code in range(0x110000)]


def main():
  runs = [len(list(run)) * 32 + category for category, run in itertools.groupby(category_of())]
  print("""// Written by dev/unicode_table.py.
#include "data/bpe/unicode.h"

namespace crossply {
namespace {

constexpr std::string_view names[] = {""")
  print("\n".join("    " + ", ".join(f'"{name}"' for name in NAMES[i:i + 15]) + "," for i in range(0, 30, 15)))
  print("""};

// clang-format off
constexpr int32_t runs[] = {""")
  line = ""
  for run in runs:
    if len(line) + len(str(run)) + 2 > 120:
      print(line)
      line = ""
    line += f"{run},"
  print(line)
  print("""};
// clang-format on

}  // namespace

std::span<const std::string_view> category_names() { return names; }

std::span<const int32_t> category_runs() { return runs; }

}  // namespace crossply""")


main()
