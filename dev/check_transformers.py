#!/usr/bin/env python3
"""Checks that a plain LLaMA travels both ways between crossply and the transformers library.

  dev/check_transformers.py [BUILD]      BUILD: the directory with the programs, default build

Out: directories written by the reference, and one written by build/train_llama, load in transformers with no weight
missing or left over, and give the logits of our reference module and the loss of build/gradients.
In: directories written by transformers load in build/gradients with the same loss.

Exit 0: all hold. 1: one does not. 77: skipped, PyTorch or transformers is not importable.
"""
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
try:
  import torch
  import transformers
except ImportError as missing:
  print(f"skipped: {missing.name} is not importable")
  sys.exit(77)
from compare_gradients import B, T, need_program, run_gradients, split
from reference import model_dir

# Of the largest logit, and of the loss: float32 in two orders of summation, and a factor of ten.
TOLERANCE = 1e-5


def check_equal(what, got, want):
  got, want = torch.as_tensor(got).double(), torch.as_tensor(want).double()
  error = ((got - want).abs().max() / want.abs().max()).item()
  if not error <= TOLERANCE:
    raise RuntimeError(f"{what} differ by {error:.3g} of the largest, allowed {TOLERANCE:g}")


def theirs(directory):
  """The directory as transformers reads it, complete or an error."""
  model, report = transformers.LlamaForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
  for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
    if report[key]:
      raise RuntimeError(f"transformers reports {key} {sorted(report[key])}")
  return model


def check_directory(directory, build):
  """Transformers, the reference and build/gradients agree about one model directory."""
  ours, other = model_dir.load(directory), theirs(directory)
  generator = torch.Generator().manual_seed(2)
  tokens = torch.randint(0, ours.config.vocab_size, (B * T + 1,), generator=generator).tolist()
  inputs, targets = split(tokens)
  with torch.no_grad():
    logits = other(inputs, use_cache=False).logits
    check_equal("the logits of transformers and of the reference", logits, ours(inputs))
    want = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
  with tempfile.TemporaryDirectory() as scratch:
    loss, _ = run_gradients(build, directory, tokens, pathlib.Path(scratch) / "gradients.safetensors")
  check_equal("the losses of gradients and of transformers", loss, want)


def written_by_reference(directory, build, **options):
  model_dir.make_tiny(directory, **options)
  return directory


def written_by_trainer(directory, build):
  """An initialised model, straight from the program people run."""
  command = [build / "train_llama", "--data", "arith:4", "--steps", "0", "--out", directory]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode != 0:
    raise RuntimeError(f"train_llama ended with {done.returncode}: {done.stderr.strip()}")
  models = [path.parent for path in sorted(directory.rglob("model.safetensors"))]
  if not models:
    raise RuntimeError("train_llama --steps 0 wrote no model.safetensors")
  return models[0]


def written_by_transformers(directory, build, tied, K, head_dim):
  # A wide initialisation, so that the loss of a random model depends on every part of it.
  config = transformers.LlamaConfig(
    vocab_size=11, hidden_size=16, intermediate_size=10, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=K, head_dim=head_dim, tie_word_embeddings=tied, max_position_embeddings=16, rms_norm_eps=1e-4,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0}, initializer_range=0.3)
  torch.manual_seed(3)
  transformers.LlamaForCausalLM(config).save_pretrained(directory)
  return directory


CASES = [(written_by_reference, {"tied": tied, "K": K, "head_dim": head_dim})
         for tied, K, head_dim in ((True, 4, 2), (True, 2, 6), (False, 2, 2))]
CASES += [(written_by_transformers, {"tied": tied, "K": K, "head_dim": head_dim})
          for tied, K, head_dim in ((True, 2, None), (False, 2, None), (False, 1, 8))]
CASES += [(written_by_trainer, {})]


def main():
  build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build")
  need_program(build / "gradients")
  need_program(build / "train_llama")
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  failures = 0
  for write, options in CASES:
    with tempfile.TemporaryDirectory() as scratch:
      try:
        check_directory(write(pathlib.Path(scratch) / "model", build, **options), build)
      except (RuntimeError, ValueError, OSError) as problem:
        failures += 1
        print(f"FAILED: {write.__name__} {options}: {problem}")
  print(f"{len(CASES) - failures} of {len(CASES)} directories mean the same to crossply and to transformers")
  sys.exit(1 if failures else 0)


if __name__ == "__main__":
  main()
