#!/usr/bin/env python3
"""Compares build/gradients with PyTorch: the loss and the gradient of every parameter, for many tiny models.

  dev/compare_gradients.py [BUILD]      BUILD: the directory with the program, default build

Exit 0: all agree. 1: some do not. 77: skipped, PyTorch is not importable.
"""
import itertools
import math
import pathlib
import re
import subprocess
import sys
import tempfile

try:
  import torch
except ImportError:
  print("skipped: PyTorch is not importable")
  sys.exit(77)
from reference import model_dir

B, T = 2, 5
# The engine computes in float32, the reference in double from the same float32 weights. What that costs was measured by
# letting PyTorch itself compute in float32, over this whole matrix and several seeds: up to 0.3 of the first limit and
# half of the second. The smallest mistake worth catching, a wrong epsilon, is 30 times the second.
LOSS_TOLERANCE = 1e-6  # relative
GRADIENT_TOLERANCE = 2e-5  # the largest difference in a tensor, relative to the tensor's root mean square
# A tensor whose gradient nearly cancels is judged by this fraction of the root mean square of all gradients instead.
FLOOR = 0.05

CONNECTIONS = (
  {"arch": "llama"},
  {"arch": "lime", "routing": "full"},
  {"arch": "lime", "routing": "average"},
  {"arch": "lime", "routing": "last", "window": 2},
  {"arch": "lime", "routing": "first", "window": 2},
)


def tiny_models():
  """Every combination, as arguments of make_tiny. The untied ones also move the q/k epsilon away from its default."""
  choices = itertools.product(CONNECTIONS, (4, 2), (False, True), (True, False), (2, 6))
  for connection, K, qk_norm, tied, head_dim in choices:
    options = dict(connection, K=K, qk_norm=qk_norm, tied=tied, head_dim=head_dim)
    if qk_norm and not tied:
      options["qk_norm_eps"] = 1e-2
    yield options


def need_program(path):
  if not path.exists():
    sys.exit(f"{path} is missing: build it first (make)")


def run_gradients(build, model, tokens, out):
  """(loss, {name: gradient}) by the program. `tokens` is a list of B*T + 1 integers."""
  token_file = pathlib.Path(out).with_suffix(".txt")
  token_file.write_text(" ".join(map(str, tokens)) + "\n")
  command = [build / "gradients", "--model", model, "--tokens", token_file, "--batch", str(B),
             "--seq", str(T), "--out", out]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode != 0:
    raise RuntimeError(f"gradients ended with {done.returncode}: {done.stderr.strip()}")
  loss = re.search(r"^loss (\S+)$", done.stdout, re.MULTILINE)
  if loss is None:
    raise RuntimeError(f"gradients printed no line 'loss NUMBER': {done.stdout!r}")
  return float(loss[1]), model_dir.read_safetensors(out)


def split(tokens):
  """Inputs and targets (B, T) of a list of B*T + 1 tokens."""
  tokens = torch.tensor(tokens)
  return tokens[:-1].view(B, T), tokens[1:].view(B, T)


def compare(build, model, tokens, out):
  """The largest error of the loss and of any gradient, as fractions of what is allowed."""
  loss, gradients = run_gradients(build, model, tokens, out)
  module = model_dir.load(model)
  want = module.loss(*split(tokens))
  want.backward()
  wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
  if gradients.keys() != wanted.keys():
    raise RuntimeError(f"gradients of {sorted(gradients.keys() ^ wanted.keys())} are on one side only")
  total = torch.cat([gradient.flatten() for gradient in wanted.values()]).square().mean().sqrt().item()
  if not math.isfinite(loss):
    return math.inf, "the loss"
  worst = abs(loss - want.item()) / (LOSS_TOLERANCE * abs(want.item())), "the loss"
  for name, gradient in wanted.items():
    got = torch.tensor(gradients[name], dtype=torch.float64)
    if got.shape != gradient.shape:
      raise RuntimeError(f"{name} is {tuple(got.shape)}, not {tuple(gradient.shape)}")
    scale = max(gradient.square().mean().sqrt().item(), FLOOR * total)
    error = (got - gradient).abs().max().item() / (GRADIENT_TOLERANCE * scale)
    if math.isnan(error):
      return error, name
    worst = max(worst, (error, name))
  return worst


def main():
  build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build")
  need_program(build / "gradients")
  generator = torch.Generator().manual_seed(1)
  failures = count = 0
  largest = 0.0
  with tempfile.TemporaryDirectory() as directory:
    model, out = pathlib.Path(directory) / "model", pathlib.Path(directory) / "gradients.safetensors"
    for seed, options in enumerate(tiny_models()):
      model_dir.make_tiny(model, seed=seed, **options)
      tokens = torch.randint(0, 7, (B * T + 1,), generator=generator).tolist()
      count += 1
      try:
        error, name = compare(build, model, tokens, out)
        complaint = "" if error <= 1 else f"{name} is off by {error:.3g} times what is allowed"
        largest = max(largest, error)
      except (RuntimeError, OSError) as problem:
        complaint = str(problem)
      if complaint:
        failures += 1
        print(f"FAILED: {' '.join(f'{key}={value}' for key, value in options.items())}: {complaint}")
  if failures:
    print(f"{failures} of {count} models differ from PyTorch")
    sys.exit(1)
  print(f"{count} models agree with PyTorch; the largest error is {largest:.2f} of what is allowed")


if __name__ == "__main__":
  main()
