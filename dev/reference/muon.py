"""Muon as build/train_* has it (kernels/optim/muon.h), and NorMuon, for reading and for checking.

torch.optim.Muon computes the same step, but its iteration is always in bf16. Here it is in the type of `precision`.
"""
import math

import torch

JORDAN = 5 * [(3.4445, -4.7750, 2.0315)]
SCALES = {
  "rms": lambda m, n: 0.2 * math.sqrt(max(m, n)),
  "original": lambda m, n: math.sqrt(max(1, m / n)),
  "spectral": lambda m, n: math.sqrt(m / n),
}


def newton_schulz(x, steps=JORDAN, safety=1.0):
  """From U S V^T (m, n) to p(S) between U and V^T, by products on the smaller side."""
  x = x / max(safety * float(x.norm()), 1e-7)
  tall = x.shape[0] > x.shape[1]
  x = x.T if tall else x
  for a, b, c in steps:
    gram = x @ x.T
    x = a * x + (b * gram + c * gram @ gram) @ x
  return x.T if tall else x


class Muon(torch.optim.Optimizer):
  """For matrices only. lr: of an update before its scale; weight_decay: decoupled, times lr."""

  def __init__(self, params, lr, weight_decay=0.1, momentum=0.95, nesterov=True, scale="rms", normalize_rows=False,
               beta2=0.95, precision=torch.float32):
    super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
                              "scale": scale, "normalize_rows": normalize_rows, "beta2": beta2,
                              "precision": precision})

  @torch.no_grad()
  def step(self, closure=None):
    loss = None
    if closure is not None:
      with torch.enable_grad():
        loss = closure()
    for group in self.param_groups:
      for weight in group["params"]:
        if weight.grad is not None:
          self.update(weight, group)
    return loss

  def update(self, weight, group):
    mu, state = group["momentum"], self.state[weight]
    if not state:
      state["m"] = torch.zeros_like(weight)
      state["v"] = weight.new_zeros(len(weight), 1)
    m = state["m"].lerp_(weight.grad, 1 - mu)
    u = weight.grad.lerp(m, mu) if group["nesterov"] else m
    o = newton_schulz(u.to(group["precision"])).to(weight)
    if group["normalize_rows"]:
      before = o.norm()
      v = state["v"].lerp_(o.square().mean(1, keepdim=True), 1 - group["beta2"])
      o = o / (v.sqrt() + 1e-10)
      o = o * before / (o.norm() + 1e-10)
    decay = group["lr"] * group["weight_decay"] * weight
    weight -= decay + group["lr"] * SCALES[group["scale"]](*weight.shape) * o
