"""What the scripts beside this one share: they read what analyze wrote, and compare."""
import json
import pathlib
import struct
import sys

import numpy as np


# The metadata of a safetensors file, and its tensors, numbers as float64.
def metadata_and_tensors(path):
  data = pathlib.Path(path).read_bytes()
  length = struct.unpack("<Q", data[:8])[0]
  kinds = {"F32": np.float32, "F64": np.float64, "I64": np.int64}
  header = json.loads(data[8:8 + length])
  metadata = header.pop("__metadata__", {})
  out = {}
  for name, entry in header.items():
    first, last = (8 + length + at for at in entry["data_offsets"])
    out[name] = np.frombuffer(data[first:last], kinds[entry["dtype"]]).reshape(entry["shape"])
  return metadata, {name: array if array.dtype == np.int64 else array.astype(np.float64) for name, array in out.items()}


def tensors(path):
  return metadata_and_tensors(path)[1]


# The tensors and the analysis of a directory.
def read(directory, subject):
  return (tensors(pathlib.Path(directory) / "values.safetensors"),
          json.loads((pathlib.Path(directory) / f"{subject}.json").read_text()))


class Comparison:
  """Counts numbers that agree, and ends the program with those that do not."""

  def __init__(self, relative=1e-6, absolute=1e-9):
    self.relative, self.absolute, self.count, self.largest, self.wrong = relative, absolute, 0, 0.0, []

  # got: of the program; want: computed here. null stands for what is not finite.
  def same(self, what, got, want):
    got = np.atleast_1d(np.asarray(got if got is not None else np.nan, dtype=np.float64))
    want = np.atleast_1d(np.asarray(want, dtype=np.float64))
    self.count += want.size
    if got.shape != want.shape:
      self.wrong.append(f"{what}: {got.shape} numbers, want {want.shape}")
      return
    both = ~(np.isnan(got) & ~np.isfinite(want))
    off = np.abs(got - want)[both] / (self.absolute / self.relative + np.abs(want[both]))
    self.largest = max(self.largest, float(off.max(initial=0)))
    if not (off <= self.relative).all():
      self.wrong.append(f"{what}: {got.tolist()}, want {want.tolist()}")

  def true(self, what, holds):
    self.count += 1
    if not holds:
      self.wrong.append(what)

  def end(self):
    for line in self.wrong[:20]:
      print(line)
    print(f"{self.count} numbers, {len(self.wrong)} of them wrong" if self.wrong or self.count == 0 else
          f"{self.count} numbers agree to {self.largest:.1e}")
    sys.exit(1 if self.wrong or self.count == 0 else 0)
