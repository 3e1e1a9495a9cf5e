#!/usr/bin/env python3
"""Compares two safetensors files in F32 or F64, tensor by tensor: norm of the difference over norm of the first.

  dev/gpu/compare_files.py A B LIMIT [--beside C]
      exit 1: a tensor is off by more than LIMIT, is not finite, or is missing
      --beside C: the limit is LIMIT and twice what C is off by, at most, in the tensors of that name in all layers;
      both relative to a hundredth of the mean norm at least

Needs nothing; with NumPy it is quick enough for models of a billion parameters.
"""
import argparse
import array
import collections
import json
import math
import re
import sys

try:
  import numpy
except ImportError:
  numpy = None


def tensors(path):
  """{name: (dtype, bytes)}. The file: a little-endian 64-bit header length, the header in JSON, the data."""
  with open(path, "rb") as file:
    data = memoryview(file.read())
  start = 8 + int.from_bytes(data[:8], "little")
  header = json.loads(bytes(data[8:start]))
  header.pop("__metadata__", None)
  return {name: (entry["dtype"], data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
          for name, entry in header.items()}


def numbers(tensor):
  kind, data = tensor
  code = {"F32": "f", "F64": "d"}[kind]
  return numpy.frombuffer(data, code).astype("d") if numpy else array.array(code, bytes(data))


def norm(numbers):
  return float(numpy.linalg.norm(numbers)) if numpy else math.hypot(*numbers)


def distances(want, got):
  """{name: norm of the difference}; not a number where one of them has something that is not finite."""
  if want.keys() != got.keys() or not want:
    sys.exit(f"FAILED: only one of the files has {sorted(want.keys() ^ got.keys())}")
  out = {}
  for name in want:
    a, b = numbers(want[name]), numbers(got[name])
    if len(a) != len(b):
      sys.exit(f"FAILED: {name} has {len(a)} numbers, and {len(b)}")
    out[name] = norm(a - b) if numpy else math.dist(a, b)
  return out


def alike(name):
  """The same for the tensors of all layers: of a single number one draw of rounding may be lucky; hardly all."""
  return re.sub(r"[0-9]+", "", name)


def main():
  parser = argparse.ArgumentParser(usage="compare_files.py A B LIMIT [--beside C]")
  for name in ("a", "b"):
    parser.add_argument(name)
  parser.add_argument("limit", type=float)
  parser.add_argument("--beside")
  o = parser.parse_args()
  want = tensors(o.a)
  off = distances(want, tensors(o.b))
  sizes = {name: norm(numbers(tensor)) for name, tensor in want.items()}
  limits = dict.fromkeys(want, o.limit)
  if o.beside:
    least = 0.01 * sum(sizes.values()) / len(sizes)
    sizes = {name: max(size, least) for name, size in sizes.items()}
    worst = collections.Counter()
    for name, distance in distances(want, tensors(o.beside)).items():
      worst[alike(name)] = max(worst[alike(name)], distance / (sizes[name] or 1))
    limits = {name: o.limit + 2 * worst[alike(name)] for name in want}
  errors = {name: distance / (sizes[name] or 1) for name, distance in off.items()}
  beyond = {name: error for name, error in errors.items() if not error <= limits[name]}  # NaN is beyond
  for name, error in beyond.items():
    print(f"{name}: {error:.3g}, limit {limits[name]:.3g}")
  name = max(errors, key=lambda key: (math.isnan(errors[key]), errors[key]))
  print(f"{len(errors)} tensors, the largest relative error is {errors[name]:.3g}, in {name}; limit {limits[name]:.3g}")
  if beyond:
    sys.exit(f"FAILED: {len(beyond)} of {len(errors)} tensors are beyond the limit")


if __name__ == "__main__":
  main()
