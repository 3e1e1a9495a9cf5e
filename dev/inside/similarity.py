#!/usr/bin/env python3
"""Linear CKA by NumPy's products of the columns of the hidden states that were dumped.

dump: hidden.*
flags: --cka-tokens 50
"""
import sys

import numpy as np

from values import Comparison, read


def main():
  values, found = read(sys.argv[1], "similarity")
  compare = Comparison()
  model = found["models"][0]
  states = []
  for layer in range(len(model["cka"])):
    windows = [window[:n] for window, n in zip(values[f"hidden.{layer}"], values["lengths"])]
    rows = np.concatenate(windows)[model["tokens"]]
    states.append(rows - rows.mean(0))
  norms = [np.linalg.norm(rows.T @ rows) for rows in states]
  for i, first in enumerate(states):
    want = [np.linalg.norm(first.T @ second) ** 2 / norms[i] / norms[j] for j, second in enumerate(states)]
    compare.same(f"hidden.{i}", model["cka"][i], want)
  compare.end()


main()
