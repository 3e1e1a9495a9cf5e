#!/usr/bin/env python3
"""Writes a token shard of random numbers below VOCAB, at most 2^16.   dev/gpu/random_tokens.py FILE COUNT VOCAB

The same each time. The format is in data/shards.h: a header of 256 int32, then the tokens as uint16.
"""
import array
import random
import sys

path, count, vocab = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
random.seed(1)
with open(path, "wb") as file:
  array.array("i", [20240520, 1, count] + [0] * 253).tofile(file)
  array.array("H", random.choices(range(vocab), k=count)).tofile(file)
