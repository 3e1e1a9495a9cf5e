#!/usr/bin/env python3
"""Checks that TensorBoard reads what --tensorboard writes: every number of metrics.jsonl at its step, once.

  dev/check_tensorboard.py [BUILD]      BUILD: the directory with the programs, default build

A tiny run loses its last checkpoint and the end of its event file, as by a kill, and is resumed; both readers of the
tensorboard package must then show what metrics.jsonl has, and for compare a run for each architecture.

Exit 0: they do. 1: they do not. 77: skipped, tensorboard is not importable.
"""
import json
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

try:
  from tensorboard.backend.event_processing import event_accumulator, plugin_event_multiplexer
except ImportError as missing:
  print(f"skipped: {missing.name} is not importable")
  sys.exit(77)

TAGS = {"loss": "loss/train", "test_loss": "loss/test", "answers_correct": "answers/correct",
        "steps_valid": "answers/steps_valid", "hard_correct": "answers/hard"}
TINY = ("--data arith:3 --train-samples 100 --test-samples 20 --width 16 --ffn 24 --layers 1 --heads 2 --batch 4 "
        "--eval-samples 8 --answer-samples 4 --tensorboard").split()


def call(program, *arguments):
  done = subprocess.run([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  if done.returncode != 0:
    raise RuntimeError(f"{program.name} ended with {done.returncode}:\n{done.stdout}")


def as_float32(number):
  return struct.unpack("f", struct.pack("f", number))[0]


# By tag, (step, value) in the order of metrics.jsonl.
def expected(run):
  curves = {}
  for text in (run / "metrics.jsonl").read_text().splitlines():
    line = json.loads(text)
    step = line.pop("step")
    line.pop("routing", None)  # an object, which TensorBoard does not get
    for key, number in line.items():
      curves.setdefault(TAGS.get(key, key), []).append((step, as_float32(number)))
  return curves


def check_equal(what, got, want):
  if got != want:
    raise RuntimeError(f"{what}: TensorBoard shows {got}, metrics.jsonl has {want}")


def check_run(run):
  want = expected(run)
  reader = event_accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={event_accumulator.SCALARS: 0})
  reader.Reload()
  check_equal("tags", sorted(reader.Tags()["scalars"]), sorted(want))
  for tag, curve in want.items():
    check_equal(tag, [(e.step, e.value) for e in reader.Scalars(tag)], curve)


# As the web page does: every directory below `top` with event files is a run.
def check_page(top, names):
  page = plugin_event_multiplexer.EventMultiplexer(tensor_size_guidance={"scalars": 0}).AddRunsFromDirectory(str(top))
  page.Reload()
  check_equal("runs", sorted(page.Runs()), sorted(f"{name}/tensorboard" for name in names))
  for name in names:
    for tag, curve in expected(top / name).items():
      got = [(e.step, float(e.tensor_proto.float_val[0])) for e in page.Tensors(f"{name}/tensorboard", tag)]
      check_equal(f"{name} {tag}", got, curve)


def main():
  build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve()
  with tempfile.TemporaryDirectory() as top:
    run = pathlib.Path(top) / "one" / "run"
    call(build / "train_llama", "--out", run, "--steps", "6", "--save-every", "2", *TINY)
    check_run(run)
    shutil.rmtree(run / "step_00000006")
    for file in (run / "tensorboard").iterdir():
      file.write_bytes(file.read_bytes()[:-5])
    call(build / "train_llama", "--resume", "--steps", "8", "--out", run)
    call(build / "train_llama", "--resume", "--steps", "10", "--out", run)
    check_run(run)
    check_page(run.parent, ["run"])
    both = pathlib.Path(top) / "both"
    call(build / "compare", "--arch", "llama,lime", "--out", both, "--steps", "4", *TINY)
    for name in ("llama", "lime"):
      check_run(both / name)
    check_page(both, ["llama", "lime"])
  print("TensorBoard shows every number of metrics.jsonl at its step, once")


if __name__ == "__main__":
  main()
