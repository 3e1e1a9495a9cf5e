#!/usr/bin/env python3
"""Matrix-based Renyi and Shannon entropies by NumPy's eigenvalues of the states and values that were dumped.

dump: hidden.* value.* own_value.*
"""
import sys

import numpy as np

from values import Comparison, read

ROUNDING = np.finfo(float).eps  # times the size: eigenvalues below that of the largest are rounding, not the data's


def entropies(rows, alpha):
  gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
  values = np.linalg.eigvalsh(gram)
  values = values[values > len(gram) * ROUNDING * max(values[-1], 0)]
  p = values / values.sum()
  shannon = float(-(p * np.log(p)).sum())
  return (shannon if alpha == 1 else float(np.log((p ** alpha).sum()) / (1 - alpha))), shannon


# Of values (N, T, H, D) of more heads than a layer makes of its own: those that are not the same as an earlier one.
def distinct_heads(value, own_heads, lengths):
  if value.shape[2] <= own_heads:
    return value
  heads = np.concatenate([window[:n] for window, n in zip(value, lengths)]).transpose(1, 0, 2)
  kept = [h for h in range(len(heads)) if not any(np.array_equal(heads[h], heads[j]) for j in range(h))]
  return value[:, :, kept]


def main():
  values, found = read(sys.argv[1], "entropy")
  compare = Comparison()
  lengths = values["lengths"]
  for layer, told in enumerate(found["models"][0]["layers"]):
    for kind, numbers in told.items():
      name = f"{kind}.{layer + (kind == 'hidden')}"
      if numbers is None:
        compare.true(f"{name} was dumped, but analyze has no numbers of it", name not in values)
        continue
      if kind == "value":
        values[name] = distinct_heads(values[name], values["own_value.0"].shape[2], lengths)
      windows = [window[:n].reshape(n, -1) for window, n in zip(values[name], lengths)]
      rows = np.concatenate(windows)
      mean, width = rows.mean(0), rows.std(0, ddof=1) + 1e-5
      all_of = np.array([entropies((window - mean) / width, found["alpha"]) for window in windows])
      compare.same(name, [numbers["mean"], numbers["shannon_mean"]], all_of.mean(0))
      compare.same(f"{name}, deviation", [numbers["std"], numbers["shannon_std"]], all_of.std(0))
      compare.same(f"{name}, bound", numbers["bound"], np.log(np.minimum(lengths, rows.shape[1])).mean())
  compare.end()


main()
