"""crossply, installed by pip: the programs, and their runs as data frames.

  crossply train_lime --data arith:3 --out runs/lime          the programs
  python -m crossply.lm_eval_crossply --model runs/lime ...   their models in lm-evaluation-harness

  import crossply
  crossply.read_metrics("runs/lime")       one row a step: loss, lr, grad_norm, test_loss where it was measured, ..
  crossply.read_results("runs/compare")    one row a run of a comparison: arch, seed, test_loss, answers, ..

The programs need no Python. Data frames need pandas, which is imported when one is asked for.
"""
import json
import os
import pathlib
import shutil
import sys

PROGRAM = pathlib.Path(__file__).resolve().parent / "crossply"


def read_metrics(run):
  """metrics.jsonl of a run directory, or such a file, as a data frame in the order of steps."""
  import pandas
  path = pathlib.Path(run)
  path = path / "metrics.jsonl" if path.is_dir() else path
  rows = []
  with path.open(encoding="utf-8") as lines:
    for number, line in enumerate(lines, 1):
      try:
        rows.append(json.loads(line))
      except ValueError as wrong:
        if line.endswith("\n"):
          raise ValueError(f"{path}:{number}: {wrong}") from None
        break  # a run that goes on is writing this line
  return pandas.DataFrame(rows)


def read_results(comparison):
  """results.json of `compare`, or such a file, as a data frame. Nested values have names with dots, evaluations are
  left out: read_metrics has them."""
  import pandas
  path = pathlib.Path(comparison)
  path = path / "results.json" if path.is_dir() else path
  with path.open(encoding="utf-8") as file:
    results = json.load(file)
  if results.get("format") != "crossply comparison":
    raise ValueError(f"{path}: this is not a comparison of crossply")
  runs = [{key: value for key, value in run.items() if key != "evaluations"} for run in results["runs"]]
  return pandas.json_normalize(runs)


def main():
  """The command `crossply`. The program prints commands to go on with under the name that it gets here."""
  name = sys.argv[0] if os.path.basename(sys.argv[0]) == "crossply" else str(PROGRAM)
  if shutil.which("crossply") == name:
    name = "crossply"
  os.execv(PROGRAM, [name, *sys.argv[1:]])
