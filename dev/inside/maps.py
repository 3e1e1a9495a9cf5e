#!/usr/bin/env python3
"""The maps of attention, computed from the queries and keys that were dumped, with the scale of
all models here: one over the root of a head's channels.

dump: query.* key.*
architectures: all lime-gpt2 bpe
"""
import pathlib
import sys

import numpy as np

from values import Comparison, read


# Of queries (T, H, D) and keys (T, K, D), the probabilities (H, T, T).
def attention(query, key):
  T, H, D = query.shape
  scores = np.einsum("thd,jhd->htj", query, key.repeat(H // key.shape[1], 1)) / np.sqrt(D)
  scores[:, np.triu(np.ones((T, T), bool), 1)] = -np.inf
  shares = np.exp(scores - scores.max(-1, keepdims=True))
  return shares / shares.sum(-1, keepdims=True)


def main():
  directory = pathlib.Path(sys.argv[1])
  values, found = read(directory, "maps")
  model = found["models"][0]
  compare = Comparison()
  compare.true("bins of several tokens, or several texts", model["bin"] == 1 and len(model["texts"]) == 1)
  n = len(model["texts"][0])
  ids = [token["id"] for token in model["texts"][0]]
  compare.true("the tokens are not the first window's", ids == values["tokens"][0][:n].tolist())
  rows = dict(line.rsplit(",", 1) for line in (directory / "maps.csv").read_text().splitlines()[1:])
  name = next(iter(rows)).rsplit(",", 4)[0]
  for layer, told in enumerate(model["layers"]):
    names = [one[len("query."):] for one in sorted(values) if (one + ".").startswith(f"query.{layer}.")]
    P = np.concatenate([attention(values[f"query.{at}"][0], values[f"key.{at}"][0]) for at in names])[:, :n, :n]
    for t in range(n):
      for head in range(len(P)):
        compare.same(f"layer {layer}, head {head}, row {t}", told["heads"][head][t], P[head, t, :t + 1])
        shares = [float(rows[f"{name},{layer},{head},{t},{j}"]) for j in range(t + 1)]
        compare.true(f"layer {layer}, head {head}, row {t} of the .csv", shares == told["heads"][head][t])
      compare.same(f"layer {layer}, row {t}", told["mean"][t], P[:, t, :t + 1].mean(0))
  compare.end()


main()
