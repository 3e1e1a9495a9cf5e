#!/usr/bin/env python3
"""Compares two safetensors files in F32 or F64, tensor by tensor: norm of the difference over norm of the first.

  dev/gpu/compare_files.py A B LIMIT      exit 1: a tensor is off by more than LIMIT, is not finite, or is missing

Needs nothing; with NumPy it is quick enough for models of a billion parameters.
"""
import array
import json
import math
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


def relative_error(a, b):
  """Not a number where one of them has something that is not finite."""
  a, b = numbers(a), numbers(b)
  if len(a) != len(b):
    return math.inf
  if numpy:
    difference, norm = float(numpy.linalg.norm(a - b)), float(numpy.linalg.norm(a))
  else:
    difference, norm = math.dist(a, b), math.hypot(*a)
  return difference / norm if norm > 0 else difference


def main():
  first, second, limit = tensors(sys.argv[1]), tensors(sys.argv[2]), float(sys.argv[3])
  if first.keys() != second.keys() or not first:
    sys.exit(f"FAILED: only one of the files has {sorted(first.keys() ^ second.keys())}")
  errors = {name: relative_error(first[name], second[name]) for name in first}
  beyond = {name: error for name, error in errors.items() if not error <= limit}  # NaN is beyond
  for name, error in beyond.items():
    print(f"{name}: {error:.3g}")
  name = max(errors, key=lambda key: (math.isnan(errors[key]), errors[key]))
  print(f"{len(errors)} tensors, the largest relative error is {errors[name]:.3g}, in {name}; limit {limit:g}")
  if beyond:
    sys.exit(f"FAILED: {len(beyond)} of {len(errors)} tensors are beyond the limit")


if __name__ == "__main__":
  main()
