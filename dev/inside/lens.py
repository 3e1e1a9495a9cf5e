#!/usr/bin/env python3
"""The logit lens from the dumped streams and the model's own norm and head, against what analyze wrote.

  analyze --model DIR --data D --what lens --dump 'hidden.*' 'mixed.*' --sequences N --length T --seed S --out OUT
  python dev/inside/lens.py OUT [DIR]        (default: the model directory that lens.json names)

Leave out 'mixed.*' for a connection that has none.

dump: *
architectures: llama gpt2 lime hyper vertical denseformer mudd bpe

NumPy computes in double, the binary in float: its norm, its product over C channels and its exponentials round. With
unit roundoff u = 6e-8 a logit sum_c n_c w_c is off by at most (sqrt(C) + 4) u sum_c |n_c w_c| but for rare cases, and
so is a loss, a difference of two logits and a mean of such; a probability is off by that share of itself. The check
allows 2 (sqrt(C) + 4) u max_t,v sum_c |n_c w_c| or 1e-6, whichever is larger, and where the two largest logits of a
position are closer than that, either may be the final prediction.
Needs NumPy.
"""
import glob
import json
import math
import os
import sys

import numpy as np
from values import read, tensors as read_tensors


def model_files(folder):
    """config.json and the tensors that are needed, in double; of a run directory, its newest checkpoint's."""
    steps = sorted(glob.glob(f"{folder}/step_*"))
    folder = folder if os.path.exists(f"{folder}/config.json") or not steps else steps[-1]
    tensors = {}
    for path in glob.glob(f"{folder}/model*.safetensors"):
        tensors.update(read_tensors(path))
    return json.load(open(f"{folder}/config.json")), tensors


def find(tensors, *names):
    for name in names:
        if name in tensors:
            return tensors[name]
    return None


class Head:
    def __init__(self, folder):
        config, tensors = model_files(folder)
        self.gpt2 = "layer_norm_epsilon" in config or any("ln_f" in name for name in tensors)
        self.eps = config.get("layer_norm_epsilon" if self.gpt2 else "rms_norm_eps", 1e-5)
        self.gain = find(tensors, "model.norm.weight", "transformer.ln_f.weight", "ln_f.weight")
        self.bias = find(tensors, "model.norm.bias", "transformer.ln_f.bias", "ln_f.bias")
        self.weight = find(tensors, "lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight",
                           "wte.weight")

    def norm(self, x):
        x = x.astype(np.float64)
        if self.gpt2:
            x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * self.gain
        return x if self.bias is None else x + self.bias

    def log_probabilities(self, x):
        """(rows, V), and how far those of the binary may be off."""
        n = self.norm(x)
        logits = n @ self.weight.T
        error = 2 * (math.sqrt(n.shape[-1]) + 4) * 6e-8 * (np.abs(n) @ np.abs(self.weight).T).max()
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)), error


def readings_of(head, stream, last, targets):
    """loss, p_truth, the least and the largest p_final, and the error, over the scored positions of all windows."""
    loss = truth = low = high = worst = 0.0
    for x, final, target in zip(stream, last, targets):
        rows = np.flatnonzero(target >= 0)
        if len(rows) == 0:
            continue
        logp, error = head.log_probabilities(x[rows])
        says, error_of_final = head.log_probabilities(final[rows])
        worst = max(worst, error)
        own = logp[np.arange(len(rows)), target[rows]]
        loss, truth = loss - own.sum(), truth + np.exp(own).sum()
        near = says >= says.max(axis=-1, keepdims=True) - 2 * error_of_final
        low += np.exp(np.where(near, logp, np.inf).min(axis=-1)).sum()
        high += np.exp(np.where(near, logp, -np.inf).max(axis=-1)).sum()
    count = (targets >= 0).sum()
    return loss / count, truth / count, low / count, high / count, worst


def main(folder, model_folder=None):
    values, found = read(folder, "lens")
    model = found["models"][0]
    head, targets = Head(model_folder or model["model"]), values["targets"]
    last = values[model["hidden"][-1]["value"]]
    if model["scored"] != int((targets >= 0).sum()):
        sys.exit(f"lens: {model['scored']} positions scored, not {(targets >= 0).sum()}")
    farthest = 0.0
    for reading in model["hidden"] + model["mixed"]:
        loss, truth, low, high, error = readings_of(head, values[reading["value"]], last, targets)
        allowed = max(error, 1e-6 * abs(loss), 1e-6)
        farthest = max(farthest, abs(reading["loss"] - loss) / abs(loss), abs(reading["p_truth"] - truth) / truth)
        if not (abs(reading["loss"] - loss) <= allowed and abs(reading["p_truth"] - truth) <= allowed * truth
                and low * (1 - allowed) <= reading["p_final"] <= high * (1 + allowed)):
            sys.exit(f"lens: {reading}: NumPy has loss {loss}, p_truth {truth}, p_final {low} to {high}, "
                     f"each to {allowed}")
        if not math.isclose(reading["perplexity"], math.exp(reading["loss"]), rel_tol=1e-12):
            sys.exit(f"lens: {reading}: the perplexity is not exp(loss)")
    print(f"lens: {len(model['hidden']) + len(model['mixed'])} readings of {model['arch']} agree, to {farthest:.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
