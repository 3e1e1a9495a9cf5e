#!/usr/bin/env python3
"""Where every head looks, from the probabilities that were dumped.

dump: attention.*
architectures: all sla-gpt2
"""
import sys

import numpy as np

from values import Comparison, read


def main():
  values, found = read(sys.argv[1], "sinks")
  compare = Comparison(absolute=1e-6)  # the probabilities were dumped as float32
  sinks = 0
  for layer, told in enumerate(found["models"][0]["layers"]):
    parts = [values[name] for name in sorted(values) if (name + ".").startswith(f"attention.{layer}.")]
    heads = np.concatenate(parts, 1)
    T = heads.shape[-1]
    distances = np.arange(T)[:, None] - np.arange(T)
    means = []
    for head, numbers in enumerate(told["heads"]):
      rows = [(P[1:n], distances[1:n]) for P, n in zip(heads[:, head], values["lengths"])]
      P, apart = (np.concatenate(part) for part in zip(*rows))
      own = np.concatenate([np.diag(whole)[1:n] for whole, n in zip(heads[:, head], values["lengths"])])
      means.append({"first": P[:, 0].mean(), "own": own.mean(), "distance": (P * apart).sum(1).mean(),
                    "entropy": -(P * np.log(np.where(P > 0, P, 1))).sum(1).mean()})
      for what, number in means[-1].items():
        compare.same(f"layer {layer}, head {head}: {what}", numbers[what], number)
    for what in means[0]:
      compare.same(f"layer {layer}: {what}", told[what], np.mean([head[what] for head in means]))
    count = sum(head["first"] > found["sink_threshold"] for head in means)
    compare.true(f"layer {layer}: {told['sink_heads']} sink heads, want {count}", told["sink_heads"] == count)
    sinks += count
  compare.same("sink heads", found["models"][0]["sink_heads"], sinks)
  compare.end()


main()
