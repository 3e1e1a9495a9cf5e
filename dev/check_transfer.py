#!/usr/bin/env python3
"""Is --transfer what the papers say? Trains tiny models in the papers' forward form and in crossply's folded form.

  dev/check_transfer.py [BUILD]      BUILD: the directory with the programs, default build

The papers multiply in the forward: the residual by mL^-alpha, the logits by 1/mN, attention's logits by sqrt(D0)/D in
the place of 1/sqrt(D). crossply has factors on rows instead (train/settings/transfer.h). Here the forward form is
written out by the papers' tables. The folded form is twice there: in PyTorch, with the factors that the program prints,
and in the program itself, on --device reference.

After 4 steps of clipped gradients losses, norms and weights of both forms must agree to 1e-12, all in float64. The
program's losses and norms must agree as far as its parameters, which are in float32, allow. At last each column of
factors is left out, which must be noticed.

Exit 0: they agree. 1: they do not. 77: skipped, PyTorch or its Muon is not importable.
"""
import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile

from check_muon import ROOT, SEED, batches

import torch
from reference import model_dir
from reference.muon import Muon

# Factors are powers of 2, so that starts in float32 and the four digits of the report are exact.
C, L, D, T, B, STEPS = 32, 4, 8, 16, 4, 4
MN, ML = 4, 4
LR, MUON_LR, DECAY, EPS, CLIP = 3e-3, 0.02, 0.1, 1e-3, 0.2
PROGRAMS = {"llama": [], "llama, q/k norm": ["--qk-norm", "true", "--tie", "false"], "gpt2": ["--bias", "true"],
            "lime": ["--kv-init", "normal"], "mhc": []}
ALLOWED, ALLOWED_OF_PROGRAM = 1e-12, 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
  arch: str  # of PROGRAMS
  rule: str  # mup | completep
  alpha: float
  optimizer: str  # adamw | muon rms | muon spectral
  base_head_width: int = D

  def residual(self):  # r
    return ML**-self.alpha if self.rule == "completep" else 1

  def depth(self):  # d
    return ML ** (self.alpha - 1) if self.rule == "completep" else 1

  def heads(self):  # h
    return math.sqrt(self.base_head_width / D)

  def __str__(self):
    alpha = f" {self.alpha:g}" if self.rule == "completep" else ""
    heads = "" if self.base_head_width == D else f", heads of {D} for {self.base_head_width}"
    return f"{self.arch}, {self.rule}{alpha}, {self.optimizer}{heads}"


@dataclasses.dataclass
class Row:
  """What a row's start, rate, weight decay, epsilon and gradient in the clipped norm are multiplied with."""
  start: float = 1
  rate: float = 1
  decay: float = 1
  eps: float = 1
  norm: float = 1


# --- the forward form, by the papers' tables ---

def is_matrix(name):
  """Of Muon, where there is one."""
  return bool(re.search(r"(_proj|(attn|ffn)_hc\.fn)(\.weight)?$", name))


def in_forward(name, case):
  """A row's own factors, and by what the forward multiplies what it stands for."""
  r, d = case.residual(), case.depth()
  if "embed_" in name or name == "lm_head.weight":
    return Row(eps=1 / MN), 1
  if name.startswith("model.norm."):
    return Row(eps=1 / MN), 1 / MN
  queries = "self_attn.q_norm" if case.arch.endswith("q/k norm") else "self_attn.q_proj"
  writes = "self_attn.o_proj" in name or "mlp.down_proj" in name
  by = r if writes else case.heads() if queries in name else 1
  if is_matrix(name) or name.endswith("hc_head.hc_fn"):
    start = MN**-0.5
    if writes and case.arch == "gpt2" and case.rule == "completep":
      start *= math.sqrt(ML)  # its base starts with sigma / sqrt(2 L0)
    of_width = {"adamw": 1 / MN, "muon rms": MN**-0.5, "muon spectral": 1}
    rate = of_width[case.optimizer if is_matrix(name) else "adamw"]
    return Row(start, rate * d, 1 / rate, r / MN), by
  if "lime_router" in name:
    return Row(rate=1 / ML if case.rule == "completep" else 1, eps=r / MN), by
  return Row(rate=d, eps=r / MN), by


def multiply_in_forward(model, case):
  for layer in model.model.layers:
    for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
      module.register_forward_hook(lambda module, inputs, output: case.residual() * output)
    attention, scale = layer.self_attn, math.sqrt(case.base_head_width) / D
    attention.attend = lambda q, k, v, visible, usual, shared, plain=attention.attend: plain(
      q, k, v, visible, scale, shared)
  model.register_forward_hook(lambda module, inputs, logits: logits / MN)


# --- the program ---

def call(build, case, rule, *words):
  """The program with the case's flags; its lines."""
  flags = [build / f"train_{case.arch.split(',')[0]}", "--seed", SEED, "--seq", T, "--batch", B, "--lr", LR,
           "--optimizer", case.optimizer.split()[0], "--weight-decay", DECAY, "--adam-eps", EPS, "--clip", CLIP,
           "--schedule", "constant", "--warmup", 0, "--eval-samples", 1, *words]
  if case.optimizer != "adamw":
    flags += ["--muon-lr", MUON_LR, "--muon-scale", case.optimizer.split()[1]]
  if rule != "none":
    flags += ["--transfer", rule, "--base-width", C // MN, "--base-head-width", case.base_head_width]
  if rule == "completep":
    flags += ["--base-layers", L // ML, "--depth-alpha", case.alpha]
  return subprocess.run([str(word) for word in flags], check=True, capture_output=True, text=True).stdout.splitlines()


def begin(build, case, rule, text, out):
  """A new model in that directory, and the factors that --dry-run prints: {name with {i} for the layer: Row}."""
  words = [*PROGRAMS[case.arch], "--data", f"text:{text}", "--width", C, "--layers", L, "--heads", C // D,
           "--ffn", 2 * C]
  call(build, case, rule, *words, "--steps", 0, "--out", out)
  rows, name = {}, None
  for line in call(build, case, rule, *words, "--steps", STEPS, "--dry-run"):
    words = line.split()
    if line.startswith(("model.", "lm_head.")):
      name, words = words[0], words[1:]  # a long name has a line of its own
    if name and words and words[0].isdigit():  # how many, shape, start, rate, decay
      rows[name] = Row(rate=float(words[-2]), decay=float(words[-1]))
    elif name and words[:2] == ["epsilon", "x"]:
      rows[name].eps, rows[name].norm = float(words[2].rstrip(",")), float(words[-1])
  return rows


def row_of(rows, name):
  return rows[re.sub(r"\.\d+\.", ".{i}.", name)]


# --- training in float64 ---

def train(model, rows, case, text):
  """Losses and norms. rows: {name: Row} of every parameter."""
  matrices, others = [], []
  for name, p in model.named_parameters():
    muon = case.optimizer != "adamw" and is_matrix(name)
    group = {"params": [p], "lr": rows[name].rate * (MUON_LR if muon else LR), "weight_decay": DECAY * rows[name].decay}
    if muon:
      matrices.append(group)
    else:
      others.append({**group, "eps": EPS * rows[name].eps})
  both = [torch.optim.AdamW(others, betas=(0.9, 0.95))]
  if matrices:
    both.append(Muon(matrices, lr=MUON_LR, scale=case.optimizer.split()[1], precision=torch.float64))
  losses, norms = [], []
  for _, (tokens, targets) in zip(range(STEPS), batches(text, T, B)):
    loss = model.loss(tokens, targets)
    loss.backward()
    norm = math.sqrt(sum((rows[name].norm * p.grad).square().sum().item() for name, p in model.named_parameters()))
    for p in model.parameters():
      p.grad *= min(1, CLIP / (norm + 1e-6))
    for optimizer in both:
      optimizer.step()
      optimizer.zero_grad()
    losses.append(loss.item())
    norms.append(norm)
  return losses, norms


def difference(a, b):
  """The largest, relative to the largest number. What should be 0, such as the biases of keys, is rounding alone."""
  a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
  return ((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item()


class Forms:
  """A case's model in both forms, trained by the forward form."""

  def __init__(self, build, case, scratch, text):
    self.case, self.text, self.scratch = case, text, scratch
    self.own = begin(build, case, "none", scratch / "text.txt", scratch / "none")
    self.printed = begin(build, case, case.rule, scratch / "text.txt", scratch / "folded")
    none, folded = (model_dir.load(scratch / name).state_dict() for name in ("none", "folded"))
    self.model = model_dir.load(scratch / "none")
    multiply_in_forward(self.model, case)
    self.by, self.starts, rows = {}, 0, {}
    with torch.no_grad():
      for name, p in self.model.named_parameters():
        f, self.by[name] = in_forward(name, case)
        p.copy_(f.start * none[name])
        self.starts = max(self.starts, difference(folded[name], self.by[name] * p))
        mine = row_of(self.own, name)
        rows[name] = dataclasses.replace(f, rate=f.rate * mine.rate, decay=f.decay * mine.decay)
    self.losses, self.norms = train(self.model, rows, case, text)

  def folded(self, rows):
    """How far a model of these rows is from the forward form in losses, norms and weights."""
    model = model_dir.load(self.scratch / "folded")
    all_rows = {name: row_of(rows, name) for name, _ in model.named_parameters()}
    losses, norms = train(model, all_rows, self.case, self.text)
    found = dict(model.named_parameters())
    weights = max(difference(found[name].detach(), self.by[name] * p.detach())
                  for name, p in self.model.named_parameters())
    return difference(losses, self.losses), difference(norms, self.norms), weights

  def program(self, build):
    """How far the program itself is, in losses and norms."""
    run = self.scratch / "run"
    call(build, self.case, self.case.rule, "--init", self.scratch / "folded", "--data",
         f"text:{self.scratch / 'text.txt'}", "--steps", STEPS, "--device", "reference", "--out", run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return tuple(difference([line[key] for line in lines], mine)
                 for key, mine in (("loss", self.losses), ("grad_norm", self.norms)))

  def without(self, column):
    """How far the folded form is if nobody had heard of one column of factors; None: it has none but 1."""
    rows = {name: dataclasses.replace(row, **{column: getattr(self.own[name], column)})
            for name, row in self.printed.items()}
    return None if rows == self.printed else max(self.folded(rows))


def cases():
  rules = [("mup", 1), ("completep", 1), ("completep", 0.5)]
  for arch in PROGRAMS:
    for rule, alpha in rules:
      for optimizer in ("adamw", "muon rms", "muon spectral"):
        heads = (D, D // 4) if arch != "mhc" and alpha == 0.5 else (D,)
        yield from (Case(arch, rule, alpha, optimizer, width) for width in heads)


def check(build, case, scratch, text):
  """Do all forms agree, and is each column noticed?"""
  forms = Forms(build, case, scratch, text)
  differences, program = (*forms.folded(forms.printed), forms.starts), forms.program(build)
  agree = max(differences) <= ALLOWED and max(program) <= ALLOWED_OF_PROGRAM
  print(f"{case}: starts {forms.starts:.1g}, losses {differences[0]:.1g}, norms {differences[1]:.1g}, weights "
        f"{differences[2]:.1g}; the program {max(program):.1g}{'' if agree else '  THEY DIFFER'}")
  if case.alpha == 1 and case.rule == "completep":
    return agree
  left_out = {column: forms.without(column) for column in ("rate", "decay", "eps", "norm")}
  print("  left out: " + ", ".join(f"{column} {by:.1g}" for column, by in left_out.items() if by is not None))
  return agree and all(by is None or by > 1e6 * ALLOWED for by in left_out.values())


def main():
  build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build").resolve()
  text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))[:20000]
  failed = []
  for case in cases():
    with tempfile.TemporaryDirectory() as scratch:
      scratch = pathlib.Path(scratch)
      (scratch / "text.txt").write_bytes(text)
      if not check(build, case, scratch, text):
        failed.append(str(case))
  print("they do not agree: " + "; ".join(failed) if failed else "they agree")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
