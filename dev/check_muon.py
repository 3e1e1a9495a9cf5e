#!/usr/bin/env python3
"""Trains the same LLaMA on the same batches with build/train_llama and with PyTorch, by Muon, and compares.

  dev/check_muon.py [BUILD]      BUILD: the directory with the programs, default build

Against dev/reference/muon.py, whose iteration is in float32: the weights after 7 steps, and the losses of 50. Against
torch.optim.Muon, whose iteration is in bf16: the losses of 50 steps, which may differ from ours by no more than its own
runs differ when the iteration rounds otherwise. Then seconds a step of all three, at a larger size: those of PyTorch
are of plain modules, without torch.compile, and a CPU without bf16 instructions makes its iteration in bf16 slow.

Exit 0: they agree. 1: they do not. 77: skipped, PyTorch or its Muon is not importable.
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import time

try:
  import torch
  from torch.optim import AdamW
  from torch.optim import Muon as TorchMuon
except ImportError:
  print("skipped: PyTorch with torch.optim.Muon is not importable")
  sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from reference import model_dir  # noqa: E402
from reference.muon import Muon  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
MASK = (1 << 64) - 1
SEED, LR, MUON_LR, DECAY = 42, 3e-3, 0.02, 0.1


# --- the order of training samples: engine/rng.h and data/loader.cpp ---

def mix_bits(x):
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
  return x ^ (x >> 31)


def random_bits(seed, stream, index):
  golden = 0x9E3779B97F4A7C15
  x = mix_bits(seed + golden & MASK)
  x = mix_bits(x ^ (stream + 2 * golden & MASK))
  return mix_bits(x + (index + 1) * golden & MASK)


def stream_of(name):
  h = 0xCBF29CE484222325
  for byte in name.encode():
    h = (h ^ byte) * 0x100000001B3 & MASK
  return h


def permute(index, n, key):
  half = max(4, ((n - 1).bit_length() + 1) // 2)
  mask, x = (1 << half) - 1, index
  while True:
    left, right = x >> half, x & mask
    for r in range(6):
      left, right = right, left ^ (random_bits(key, r, right) & mask)
    x = left << half | right
    if x < n:
      return x


def batches(text, T, B):
  """Tokens and targets (B, T) of one step after the other: bytes in windows of T + 1, a tenth of them for the test."""
  windows = len(text) // (T + 1)
  n = windows - max(1, windows // 10)
  data = torch.tensor(list(text), dtype=torch.long)
  position = 0
  while True:
    rows = []
    for b in range(B):
      epoch, index = divmod(position + b, n)
      at = permute(index, n, random_bits(SEED, stream_of("loader"), epoch)) * (T + 1)
      rows.append(data[at : at + T + 1])
    position += B
    both = torch.stack(rows)
    yield both[:, :-1], both[:, 1:]


# --- both programs ---

def call(build, text, out, steps, size, optimizer="muon"):
  C, F, L, H, T, B = size
  words = [build / "train_llama", "--data", f"text:{text}", "--width", C, "--ffn", F, "--layers", L, "--heads", H,
           "--seq", T, "--batch", B, "--steps", steps, "--seed", SEED, "--optimizer", optimizer, "--muon-lr", MUON_LR,
           "--lr", LR, "--weight-decay", DECAY, "--schedule", "constant", "--warmup", 0, "--clip", 0,
           "--eval-samples", 1, "--out", out]
  subprocess.run([str(word) for word in words], check=True, capture_output=True)


def losses_of(run):
  return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def optimizers(model, flags, make_muon):
  """AdamW of what is no matrix of a block, without decay, since the head is the embedding; Muon of the others."""
  matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2]
  known = {id(p) for p in matrices}
  others = [p for p in model.parameters() if id(p) not in known]
  adamw = AdamW(others, lr=LR, betas=(flags["beta1"], flags["beta2"]), eps=flags["adam_eps"], weight_decay=0)
  return [make_muon(matrices), adamw]


def train(start, flags, make_muon, text, steps, size, dtype=torch.float32):
  T, B = size[4:]
  model = model_dir.load(start, dtype)
  model.train()
  both, losses, seconds = optimizers(model, flags, make_muon), [], []
  for _, (tokens, targets) in zip(range(steps), batches(text, T, B)):
    begin = time.perf_counter()
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    for optimizer in both:
      optimizer.step()
      optimizer.zero_grad()
    losses.append(loss.item())
    seconds.append(time.perf_counter() - begin)
  return model, losses, sorted(seconds)[len(seconds) // 2]


def by_torch(matrices):
  return TorchMuon(matrices, lr=MUON_LR, weight_decay=DECAY, momentum=0.95, nesterov=True,
                   adjust_lr_fn="match_rms_adamw")


def by_reference(precision, **more):
  return lambda matrices: Muon(matrices, lr=MUON_LR, weight_decay=DECAY, precision=precision, **more)


def largest_difference(a, b):
  return max(abs(x - y) for x, y in zip(a, b))


def main():
  build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build").resolve()
  failed = False
  with tempfile.TemporaryDirectory() as scratch:
    scratch = pathlib.Path(scratch)
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    file = scratch / "text.txt"
    file.write_bytes(text)
    size = (64, 192, 4, 4, 64, 16)
    call(build, file, scratch / "start", 0, size)
    call(build, file, scratch / "run", 50, size)
    flags = json.loads((scratch / "run" / "flags.json").read_text())
    start, ours = scratch / "start", losses_of(scratch / "run")

    for optimizer, rows in (("muon", False), ("normuon", True)):
      call(build, file, scratch / optimizer, 7, size, optimizer)
      found = model_dir.read_safetensors(scratch / optimizer / "step_00000007" / "model.safetensors")
      reference = by_reference(torch.float32, normalize_rows=rows)
      wanted = train(start, flags, reference, text, 7, size)[0].state_dict()
      worst = max(float(abs(torch.tensor(found[name]) - wanted[name]).max()) for name in found)
      print(f"weights after 7 steps of {optimizer}, iteration in float32: they differ by {worst:.2g}, at most 1e-5 is "
            "allowed")
      failed |= not worst <= 1e-5

    def losses_by(make_muon, dtype=torch.float32):
      return train(start, flags, make_muon, text, 50, size, dtype)[1]

    theirs = losses_by(by_torch)
    others = {"the same in a model of float64": losses_by(by_torch, torch.float64),
              "the reference in float32": losses_by(by_reference(torch.float32)),
              "the reference in bf16": losses_by(by_reference(torch.bfloat16))}
    for name, losses in others.items():
      print(f"losses of 50 steps: torch.optim.Muon and {name} differ by {largest_difference(theirs, losses):.2g}")
    bound = max(largest_difference(theirs, losses) for losses in others.values())
    own = largest_difference(theirs, ours)
    print(f"losses of 50 steps: torch.optim.Muon and ours differ by {own:.2g}; the last are {theirs[-1]:.5f} and "
          f"{ours[-1]:.5f}")
    exact = largest_difference(others["the reference in float32"], ours)
    print(f"losses of 50 steps: the reference in float32 and ours differ by {exact:.2g}")
    failed |= not own <= bound

    size = (256, 768, 6, 8, 256, 8)
    call(build, file, scratch / "large", 0, size)
    for turn in (1, 2):
      run = scratch / f"timed_{turn}"
      call(build, file, run, 8, size)
      lines = [json.loads(line)["seconds"] for line in (run / "metrics.jsonl").read_text().splitlines()]
      ours = sorted(b - a for a, b in zip(lines, lines[1:]))
      theirs, in_f32 = (train(scratch / "large", flags, how, text, 4, size)[2]
                        for how in (by_torch, by_reference(torch.float32)))
      print(f"seconds a step, C=256 L=6, 2,048 tokens, {torch.get_num_threads()} threads: ours "
            f"{ours[len(ours) // 2]:.3f}, torch.optim.Muon {theirs:.3f}, the reference in float32 {in_f32:.3f}")
  print("they do not agree" if failed else "they agree")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
