#!/usr/bin/env python3
"""Rank and mass of attention, by NumPy's singular values of the probabilities that were dumped.

dump: attention.*
architectures: all lime-gpt2 bpe
"""
import sys

import numpy as np

from values import Comparison, read


# How many of these, the largest first, make up this share of their sum.
def fewest(energies, share):
  return int(np.searchsorted(np.cumsum(np.sort(energies)[::-1]), share * energies.sum()) + 1)


def main():
  values, found = read(sys.argv[1], "attention")
  compare = Comparison()
  near = 1e-5  # the probabilities were dumped as float32: a count may jump where a sum is so close to its share
  for layer, told in enumerate(found["models"][0]["layers"]):
    parts = [values[name] for name in sorted(values) if (name + ".").startswith(f"attention.{layer}.")]
    heads = np.concatenate(parts, 1)
    for head, numbers in enumerate(told["heads"]):
      bounds = {"rank": [], "mass": []}
      for P, n in zip(heads[:, head], values["lengths"]):
        A = P[:n, :n]
        singular, columns = np.linalg.svd(A, compute_uv=False) ** 2, (A ** 2).sum(0)
        bounds["rank"].append([fewest(singular, found["tau"] + side * near) for side in (-1, 1)])
        bounds["mass"].append([fewest(columns, found["eta"] + side * near) for side in (-1, 1)])
      for what, pairs in bounds.items():
        low, high = np.mean(pairs, 0)
        compare.true(f"layer {layer}, head {head}: {what} {numbers[what]}, want {low} to {high}",
                     low - 1e-9 <= numbers[what] <= high + 1e-9)
    compare.same(f"layer {layer}: MaxRank", told["max_rank"], max(head["rank"] for head in told["heads"]))
  compare.end()


main()
