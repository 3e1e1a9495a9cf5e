#!/usr/bin/env python3
"""Compares build/gradients with the papers' official code: the loss and the gradient of every parameter.

  dev/compare_official.py [--build BUILD] [--official DIR] [NAME ...]

DIR, else $CROSSPLY_OFFICIAL, holds the checkouts, each in its folder, and under site/ the versions of transformers that
they need: dev/official/README.md lists them and how to get them. NAME: some of the modules in dev/official instead of
all. None of that code is part of this project; each repository is imported in a process of its own, because their
modules have the same names.

Exit 0: all that is installed agrees. 1: something does not. 77: skipped, nothing is installed.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

try:
  import torch
except ImportError:
  print("skipped: PyTorch is not importable")
  sys.exit(77)

NAMES = ("transformers_llama", "lime", "lime_static", "satformer", "value_residual", "denseformer", "muddformer",
         "deepseek_v4", "gemma3n", "gemma3n_model", "qwen4_exp", "tile_kernels",
         "nanochat", "qlabs", "slowrun", "modded_nanogpt", "depth_attention", "moda")
SHOWN = 3  # failures of each row that are printed
SITE = "site"  # the folder with the Python packages that checkouts need, a folder for each version


def missing(adapter, root):
  """What must be there and is not, or ''."""
  if not adapter.CHECKOUTS:
    return "" if importlib.util.find_spec(adapter.ABOUT) else f"{adapter.ABOUT} is not importable"
  if root is None:
    return "neither --official nor CROSSPLY_OFFICIAL says where"
  wanted = [root / folder for folder in adapter.CHECKOUTS]
  if adapter.PACKAGES:
    wanted.append(root / SITE / adapter.PACKAGES)
  absent = [str(path) for path in wanted if not path.is_dir()]
  return f"no directory {' and '.join(absent)}" if absent else ""


def commit(folder):
  """What a checkout stands at, or '' where git does not know."""
  done = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True)
  own = (folder / ".git").exists()  # a plain copy inside another repository has no commit of its own
  return done.stdout.strip() if own and done.returncode == 0 else ""


def compare(adapter, build, model, options):
  """(tensors, error, allowed, where): the worst error of the loss and the gradients in multiples of the plain limits,
  and what PyTorch's own rounding in this model makes of the limits."""
  import compare_gradients as gradients
  from official.common import official_gradients
  from reference import model_dir

  model_dir.make_tiny(model, **options)
  generator = torch.Generator().manual_seed(options["seed"])
  tokens = torch.randint(0, 7, (gradients.B * gradients.T + 1,), generator=generator).tolist()
  loss, ours = gradients.run_gradients(build, model, tokens, model / "gradients.safetensors")
  want = official_gradients(adapter, model, *gradients.split(tokens))
  if ours.keys() != want[1].keys():
    raise RuntimeError(f"gradients of {sorted(ours.keys() ^ want[1].keys())} are on one side only")
  got = loss, {name: torch.tensor(array, dtype=torch.float64) for name, array in ours.items()}
  error, where = gradients.worst_error(got, want)
  allowed = 1.0
  if error > 1:  # the reference in both precisions: what it has in common with the official code is only its rounding
    own = gradients.own_error(model, tokens, gradients.autograd(model_dir.load(model), tokens))
    allowed = max(allowed, gradients.OWN_FACTOR * own)
  return len(ours), error, allowed, where


def work(name, build, root):
  """Compares one repository. Prints a line of JSON for each model: row, tensors, error, allowed, problem."""
  from official.common import in_other_shapes, use

  adapter = importlib.import_module(f"official.{name}")
  if adapter.PACKAGES:
    use(root / SITE / adapter.PACKAGES)
  adapter.load(root)
  torch.set_num_threads(1)  # the models are tiny
  for row, options in in_other_shapes(adapter.models()):
    described = " ".join(f"{key}={value}" for key, value in options.items())
    with tempfile.TemporaryDirectory() as directory:
      result = dict(row=row, tensors=0, error=0.0, allowed=1.0, problem="")
      try:
        tensors, error, allowed, where = compare(adapter, build, pathlib.Path(directory), options)
        result.update(tensors=tensors, error=error, allowed=allowed)
        if not error <= allowed:  # NaN is not
          result["problem"] = f"{described}: {where} is off by {error / allowed:.3g} times what is allowed"
      except (RuntimeError, OSError) as problem:
        result["problem"] = f"{described}: {problem}"
    print(json.dumps(result), flush=True)


def results(name, arguments):
  """What work(name) printed, by a process of its own. Its other output goes to the terminal."""
  command = [sys.executable, __file__, "--work", "--build", arguments.build, name]
  if arguments.official:
    command += ["--official", arguments.official]
  quiet = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**quiet, **os.environ})
  lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"row"')]
  if done.returncode != 0 or not lines:
    problem = f"ended with {done.returncode} after {len(lines)} models"
    lines.append(dict(row="(its code)", tensors=0, error=0.0, allowed=1.0, problem=problem))
  return lines


def table_rows(about, lines, limit):
  """A line of the table for each row. Prints what failed."""
  table = []
  for row in dict.fromkeys(line["row"] for line in lines):
    mine = [line for line in lines if line["row"] == row]
    failed = [line["problem"] for line in mine if line["problem"]]
    for problem in failed[:SHOWN]:
      print(f"FAILED: {about}: {problem}")
    if len(failed) > SHOWN:
      print(f"FAILED: {about}: {len(failed) - SHOWN} more of {row}")
    worst = max(line["error"] for line in mine) * limit
    wide = sum(line["error"] > 1 and not line["problem"] for line in mine)
    tensors = sum(line["tensors"] for line in mine)
    table.append(f"| {about} | {row} | {len(mine)} | {tensors} | {worst:.1e} | {wide} | {len(failed)} |")
  return table


def run(name, arguments, root, limit):
  """Compares with one repository. Returns what results() and table_rows() do, nothing where it is not installed."""
  adapter = importlib.import_module(f"official.{name}")
  if reason := missing(adapter, root):
    print(f"not installed, skipped: {adapter.ARCHITECTURES} of {adapter.ABOUT}: {reason}", flush=True)
    return [], []
  for folder, wanted in adapter.CHECKOUTS.items():
    if (found := commit(root / folder)) != wanted:
      print(f"note: {folder} stands at {found or 'an unknown commit'}, the results of the page were of {wanted}")
  lines = results(name, arguments)
  print(f"{adapter.ABOUT}: {len(lines)} models", flush=True)
  return lines, table_rows(adapter.ABOUT, lines, limit)


def parse():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("names", nargs="*", metavar="NAME")
  parser.add_argument("--build", default="build")
  parser.add_argument("--official", metavar="DIR", default=os.environ.get("CROSSPLY_OFFICIAL"))
  parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)  # this process is one of its own
  arguments = parser.parse_args()
  if unknown := set(arguments.names) - set(NAMES):
    parser.error(f"{' '.join(sorted(unknown))}: choose from {' '.join(NAMES)}")
  return arguments


def main():
  arguments = parse()
  root = pathlib.Path(arguments.official).resolve() if arguments.official else None
  if arguments.work:
    return work(arguments.names[0], pathlib.Path(arguments.build), root)
  from compare_gradients import GRADIENT_TOLERANCE, need_program

  need_program(pathlib.Path(arguments.build) / "gradients")
  everything, table = [], []
  for name in arguments.names or NAMES:
    lines, rows = run(name, arguments, root, GRADIENT_TOLERANCE)
    everything += lines
    table += rows
  if not everything:
    print("skipped: no official code is installed")
    sys.exit(77)
  print("\n| code | model | models | tensors | largest difference | beyond the plain limits | wrong |")
  print("\n".join(["|---" * 7 + "|", *table]))
  wrong, tensors = sum(bool(line["problem"]) for line in everything), sum(line["tensors"] for line in everything)
  print(f"\n{len(everything)} models, {tensors} tensors, {wrong} models wrong. Differences are relative to each "
        f"tensor's root mean square; the plain limit is {GRADIENT_TOLERANCE:g}.")
  sys.exit(1 if wrong else 0)


if __name__ == "__main__":
  main()
