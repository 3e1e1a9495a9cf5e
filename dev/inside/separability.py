"""Checks analyze --what separability: trains the same linear probes with NumPy on the same vectors.

    analyze --model M... --data D --what separability --keep-vectors true --out DIR
    python dev/inside/separability.py DIR

dump:
flags: --keep-vectors true --sequences 100 --ids 32 101 116 97
architectures: llama lime

The random numbers are counted, not drawn (engine/rng.h), so that folds, beginnings and orders can be made here again;
the training is written as matrix products of whole batches. An accuracy is a count of right answers, so it agrees
exactly unless a row lies on the border between two classes to 1e-12 or so; one answer of a batch of 64 is allowed.
"""

import sys

import numpy as np
from occurrences import models_of

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FOLDS, BATCH, RATE = 5, 64, 1e-2


def mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def stream_of(name):
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 & MASK
    return h


def bits(seed, stream):
    """Random(seed, stream).bits(), one after the other."""
    x = mix(mix(seed + GOLDEN & MASK) ^ (stream + 2 * GOLDEN & MASK))
    index = 0
    while True:
        yield mix(x + (index + 1) * GOLDEN & MASK)
        index += 1


def shuffled(n, seed, stream):
    order = np.arange(n)
    draws = bits(seed, stream)
    for i in range(n - 1, 0, -1):
        j = next(draws) * (i + 1) >> 64
        order[[i, j]] = order[[j, i]]
    return order


def beginning(classes, channels, seed, stream):
    draws = bits(seed, stream)
    uniform = np.array([(next(draws) >> 11) * 2.0**-53 for _ in range(classes * (channels + 1))])
    numbers = (2 * uniform - 1) / np.sqrt(channels)
    return numbers[: classes * channels].reshape(classes, channels), numbers[classes * channels :]


class Adam:
    def __init__(self, weights):
        self.weights, self.m, self.v, self.t = weights, np.zeros_like(weights), np.zeros_like(weights), 0

    def update(self, gradient):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        step = self.m / (1 - 0.9**self.t) / (np.sqrt(self.v / (1 - 0.999**self.t)) + 1e-8)
        self.weights -= RATE * step


def accuracy_of(x, labels, order, test, weights, bias):
    both = [Adam(weights), Adam(bias)]
    one = np.eye(len(bias))
    for begin in range(0, len(order), BATCH):
        rows = order[begin : begin + BATCH]
        logits = x[rows] @ weights.T + bias
        p = np.exp(logits - logits.max(1, keepdims=True))
        error = (p / p.sum(1, keepdims=True) - one[labels[rows]]) / len(rows)
        both[0].update(error.T @ x[rows])
        both[1].update(error.sum(0))
    right = (x[test] @ weights.T + bias).argmax(1) == labels[test]
    return np.mean([right[begin : begin + BATCH].mean() for begin in range(0, len(right), BATCH)])


def main(directory):
    found, models = models_of(directory, "separability")
    seed, checked, largest = found["seed"], 0, 0.0
    for model, tensors in models:
        labels = tensors["labels"]
        n, classes = len(labels), len(model["classes"])
        parts = np.array_split(shuffled(n, seed, stream_of("separability.folds")), FOLDS)
        tests = [np.sort(part) for part in parts]
        orders = [shuffled(n, seed, stream_of(f"separability.order.{k}")) for k in range(FOLDS)]
        orders = [order[~np.isin(order, test)] for order, test in zip(orders, tests)]
        assert model["updates"] == -(-len(orders[0]) // BATCH), "updates"
        for kind, after in (("value", 0), ("own_value", 0), ("hidden", 1)):
            for layer, told in enumerate(model[kind]):
                x = tensors[f"{kind}.{layer + after}"].astype(np.float64)
                folds = []
                for k in range(FOLDS):
                    begin = beginning(classes, x.shape[1], seed, stream_of(f"separability.init.{k}"))
                    folds.append(accuracy_of(x, labels, orders[k], tests[k], *begin))
                # One answer, where the last batch is small, counts the more.
                last = len(tests[-1]) % BATCH or BATCH
                slack = 1 / min(last, BATCH) / (-(-len(tests[-1]) // BATCH)) + 1e-12
                off = np.abs(np.array(folds) - told["folds"])
                largest = max(largest, off.max())
                assert off.max() <= slack, f"{kind} {layer}: {folds} here, {told['folds']} there"
                assert abs(np.mean(told["folds"]) - told["mean"]) < 1e-12, "mean"
                assert abs(np.std(told["folds"]) - told["std"]) < 1e-12, "deviation"
                checked += 1
    print(f"separability: {checked} curves' points agree, accuracies to {largest:.1g}")


if __name__ == "__main__":
    main(sys.argv[1])
