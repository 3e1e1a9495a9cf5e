#!/usr/bin/env python3
"""Writes data/bpe/nfc_table.cpp: what Unicode's normalization form C does, as the tokenizers package does it.

  dev/unicode_nfc.py >data/bpe/nfc_table.cpp

The decompositions, and which of them are composed again, are asked of the package's NFD and NFC. A combining class is
Python's; that a character has one, and which of two comes first, is asked of the package again.
"""
import sys
import unicodedata

from tokenizers import normalizers

NFC, NFD = normalizers.NFC().normalize_str, normalizers.NFD().normalize_str
CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000 and not 0xAC00 <= c < 0xD7A4]  # Hangul is a formula


def combining_classes():
  classes = {}
  for code in CODES:
    mark = chr(code)
    moves = NFD("a" + mark + "\u0334") == "a\u0334" + mark  # U+0334 has the least class, 1
    if moves or NFD("a\u0345" + mark) == "a" + mark + "\u0345":  # and U+0345 the greatest, 240
      classes[code] = unicodedata.combining(mark)
      assert classes[code] > 0, f"U+{code:04X} has no class here"
  some = {}
  for code, number in classes.items():
    some.setdefault(number, chr(code))
  for code, number in classes.items():
    for other, mark in some.items():
      swaps = NFD("a" + chr(code) + mark) != "a" + chr(code) + mark
      assert swaps == (number > other) or NFD(mark) != mark or NFD(chr(code)) != chr(code), f"U+{code:04X}"
  return classes


def runs_of(classes):
  runs, end = [], 0
  for code, number in sorted(classes.items()):
    if runs and code == end and number == runs[-1][2]:
      runs[-1][1] += 1
    else:
      runs.append([code - end, 1, number])
    end = code + 1
  return [number for run in runs for number in run]


def rows_of(numbers):
  rows, line = [], ""
  for number in numbers:
    if len(line) + len(str(number)) + 2 > 120:
      rows.append(line)
      line = ""
    line += f"{number},"
  return "\n".join(rows + [line])


def main():
  decompositions, count, before = [], 0, 0
  for code in CODES:
    parts = NFD(chr(code))
    if parts == chr(code):
      continue
    composes = len(parts) > 1 and NFC(chr(code)) == chr(code)
    assert not composes or len(NFC(parts[:-1])) == 1, f"U+{code:04X}"
    decompositions += [code - before, 2 * len(parts) + composes, *map(ord, parts)]
    count, before = count + 1, code
  classes = combining_classes()
  print(f"{count} decompositions, {len(classes)} combining characters", file=sys.stderr)
  print(f"""// Written by dev/unicode_nfc.py.
#include "data/bpe/nfc.h"

namespace crossply {{
namespace {{

// clang-format off
constexpr uint32_t decompositions[] = {{
{rows_of(decompositions)}
}};

constexpr uint32_t marks[] = {{
{rows_of(runs_of(classes))}
}};
// clang-format on

}}  // namespace

std::span<const uint32_t> canonical_decompositions() {{ return decompositions; }}

std::span<const uint32_t> combining_classes() {{ return marks; }}

}}  // namespace crossply""")


main()
