#!/usr/bin/env python3
"""The gates' statistics from the dumped gates, against what analyze wrote.

  analyze --model DIR --data D --what gates --dump 'gate.*' --sequences N --length T --seed S --out OUT
  python dev/inside/gates.py OUT

dump: gate.*
architectures: satformer relay

Means, exact zeros, the heads' variation and the constants of the interventions are sums in double of the same numbers,
so they agree to 1e-12 relative (only the order of the sums differs). What the interventions did to the loss needs the
model's forward and is tested elsewhere (tests/eval/test_gates.cpp); here, that the changes follow from the losses.
Needs NumPy.
"""
import math
import sys

import numpy as np
from values import read


def check(name, got, want, relative=1e-12):
    if got is None or want is None or not math.isclose(got, want, rel_tol=relative, abs_tol=1e-12):
        sys.exit(f"gates: {name}: analyze has {got}, NumPy {want}")


def tokens_of(gates, lengths):
    """(tokens, heads) without the padding."""
    return np.concatenate([window[:length] for window, length in zip(gates, lengths)])


def check_block(block, gates, lengths, calibration, base):
    layer = block["layer"]
    constants, looked_at = (tokens_of(gates[part], lengths[part])
                            for part in (slice(0, calibration), slice(calibration, None)))
    means = looked_at.mean(axis=0)
    check(f"layer {layer}: mean", block["mean"], looked_at.mean())
    check(f"layer {layer}: sparsity", block["sparsity"], (looked_at == 0).mean())
    for j, mean in enumerate(means):
        check(f"layer {layer}: mean of head {j}", block["head_means"][j], mean)
        check(f"layer {layer}: sparsity of head {j}", block["head_sparsity"][j], (looked_at[:, j] == 0).mean())
        check(f"layer {layer}: constant of head {j}", block["calibration_head_means"][j], constants[:, j].mean())
    if means.mean() != 0:
        check(f"layer {layer}: variation", block["head_variation"], means.std() / abs(means.mean()))
    elif block["head_variation"] is not None:
        sys.exit(f"gates: layer {layer}: a variation of heads that are all shut: {block['head_variation']}")
    check(f"layer {layer}: constant", block["calibration_mean"], constants.mean())
    for what in ("zero", "set_to_mean", "set_to_head_means"):
        change = block[what]["delta_perplexity"]
        check(f"layer {layer}: {what}", change, math.exp(block[what]["loss"]) - math.exp(base))
        check(f"layer {layer}: error of {what}", block[what]["delta_perplexity_error"],
              math.exp(block[what]["loss"]) * block[what]["loss_error"])


def main(folder):
    values, found = read(folder, "gates")
    model = found["models"][0]
    scored = values["targets"][model["calibration_windows"]:]
    check("scored positions", model["scored"], int((scored >= 0).sum()))
    check("perplexity", model["perplexity"], math.exp(model["loss"]))
    for block in model["blocks"]:
        check_block(block, values[f"gate.{block['layer']}"], values["lengths"], model["calibration_windows"],
                    model["loss"])
    print(f"gates: {len(model['blocks'])} blocks of {model['arch']} agree")


if __name__ == "__main__":
    main(sys.argv[1])
