"""PyTorch's side of `bench products`, and of the products of `bench gpu`.

Speaks lines on its standard streams: prints `ready`, then for each line "fp32|bf16 forward|dinput|dweight ROWS IN OUT
SECONDS" repeats that product for that long and prints the seconds of one. Used by dev/bench_products.cpp and
dev/bench_gpu.cpp.
"""

import functools
import sys
import time

import torch

from bench_torch_attention import begin, seconds_per_call


@functools.lru_cache(maxsize=6)
def product(form, rows, width, out_width, dtype, device):
    def fill(*shape):  # on a GPU what is multiplied decides about the clock
        return (torch.randn if device == "cuda" else torch.rand)(shape, device=device).to(dtype)

    x, w, dy = fill(rows, width), fill(out_width, width), fill(rows, out_width)
    a, b = {"forward": (x, w.t()), "dinput": (dy, w), "dweight": (dy.t(), x)}[form]
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=device)
    return lambda: torch.mm(a, b, out=out)


def main():
    s, device = begin(__doc__)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    print("ready", flush=True)
    for line in sys.stdin:
        dtype, form, rows, width, out_width, least = line.split()
        body = product(form, int(rows), int(width), int(out_width), types[dtype], device)
        if s.gpu:
            print(seconds_per_call(device, float(least), body), flush=True)
            product.cache_clear()
            continue
        body()
        start, calls, taken = time.perf_counter(), 0, 0.0
        while taken < float(least):
            body()
            calls += 1
            taken = time.perf_counter() - start
        print(taken / calls, flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
