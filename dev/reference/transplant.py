#!/usr/bin/env python3
"""Checks what build/transplant makes of a GPT-2 in Hugging Face's layout: lists of blocks, and half the width.

  dev/reference/transplant.py [BUILD]      BUILD: the directory with the programs, default build

The state dict is made here, with random numbers, in the layout of files: fused queries, keys and values, [in, out].

Exit 0: every tensor is the same bit for bit. 1: one is not. 77: skipped, PyTorch is not importable.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
try:
  import torch
except ImportError:
  print("skipped: PyTorch is not importable")
  sys.exit(77)
from reference.model_dir import read_safetensors, write_safetensors

V, P, C, H, L = 11, 9, 24, 6, 4
PREFIX = "transformer."  # of every name in a file
CONFIG = {"model_type": "gpt2", "vocab_size": V, "n_positions": P, "n_embd": C, "n_head": H, "n_layer": L,
          "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "scale_attn_by_inverse_layer_idx": True}
SHAPES = {"ln_1.weight": [C], "ln_1.bias": [C], "attn.c_attn.weight": [C, 3 * C], "attn.c_attn.bias": [3 * C],
          "attn.c_proj.weight": [C, C], "attn.c_proj.bias": [C], "ln_2.weight": [C], "ln_2.bias": [C],
          "mlp.c_fc.weight": [C, 4 * C], "mlp.c_fc.bias": [4 * C], "mlp.c_proj.weight": [4 * C, C],
          "mlp.c_proj.bias": [C]}


def random_state():
  torch.manual_seed(1)
  state = {"wte.weight": torch.randn(V, C), "wpe.weight": torch.randn(P, C), "ln_f.weight": torch.randn(C),
           "ln_f.bias": torch.randn(C)}
  for layer in range(L):
    state |= {f"h.{layer}.{name}": torch.randn(shape) for name, shape in SHAPES.items()}
  return state


def choose(state, blocks):
  """Block i of the new model is block blocks[i] of the old one."""
  chosen = {name: value for name, value in state.items() if not name.startswith("h.")}
  for to, block in enumerate(blocks):
    chosen |= {f"h.{to}.{name}": state[f"h.{block}.{name}"] for name in SHAPES}
  return chosen


def rescale(state, blocks):
  """Queries of moved blocks times the number of their new layer over that of the old one."""
  for to, block in enumerate(blocks):
    for kind in ("weight", "bias"):
      fused = state[f"h.{to}.attn.c_attn.{kind}"].clone()
      fused[..., :C] = (fused[..., :C].double() * (to + 1) / (block + 1)).float()
      state[f"h.{to}.attn.c_attn.{kind}"] = fused
  return state


def narrow(state, width):
  """The leading part of every tensor, and of the fused ones that of queries, keys and values each."""
  parts = {}
  for name, value in state.items():
    if "c_attn" in name:
      value = torch.cat([third[..., :width] for third in value.split(C, dim=-1)], dim=-1)
    elif "c_fc" in name:
      value = value[..., : 4 * width]
    else:
      value = value[..., :width]
    inputs = {"c_proj.weight": 4 * width if "mlp" in name else width, "c_attn.weight": width, "c_fc.weight": width}
    parts[name] = next((value[:n] for end, n in inputs.items() if name.endswith(end)), value)
  return parts


def main():
  build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build")
  if not (build / "transplant").exists():
    sys.exit(f"{build}/transplant is missing: build it first")
  state = random_state()
  cases = [
    (["--blocks", "0-3"], state),
    (["--blocks", "0-1,0-1"], choose(state, [0, 1, 0, 1])),
    (["--blocks", "0,2,2-3"], choose(state, [0, 2, 2, 3])),
    (["--blocks", "2-3,0", "--rescale-q", "true"], rescale(choose(state, [2, 3, 0]), [2, 3, 0])),
    (["--width", "12"], narrow(state, 12)),
    (["--width", "16", "--heads", "4", "--blocks", "1-2"], narrow(choose(state, [1, 2]), 16)),
  ]
  failures = 0
  with tempfile.TemporaryDirectory() as scratch:
    source = pathlib.Path(scratch) / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(source / "model.safetensors", {PREFIX + name: value.numpy() for name, value in state.items()})
    for i, (flags, want) in enumerate(cases):
      out = pathlib.Path(scratch) / f"made{i}"
      subprocess.run([build / "transplant", "--model", source, "--out", out, *flags], check=True, capture_output=True)
      arrays = read_safetensors(out / "model.safetensors")
      got = {name.removeprefix(PREFIX): torch.from_numpy(array.copy()) for name, array in arrays.items()}
      wrong = sorted(set(got) ^ set(want)) or [name for name in want if not torch.equal(got[name], want[name])]
      if wrong:
        failures += 1
        print(f"FAILED: {' '.join(flags)}: {', '.join(wrong[:5])}")
  print(f"{len(cases) - failures} of {len(cases)} models are what PyTorch makes of the same numbers")
  return 1 if failures else 0


if __name__ == "__main__":
  sys.exit(main())
