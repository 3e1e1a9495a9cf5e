"""PyTorch's side of the attention part of `bench gpu`: causal attention in bf16, by the faster of its kernels.

Speaks lines on its standard streams: prints `ready`, then for each line "B T H K D SECONDS" repeats the forward and the
backward for that long each, and prints the seconds of one of each and the kernel's name. Used by dev/bench_gpu.cpp;
bench_torch.py asks it which kernel to take.
"""

import argparse
import signal
import sys
import time
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Math alone is for where there is nothing else: a CPU's flash kernel takes no grouped heads.
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_per_call(device, least, body):
    """Calls in a row without a wait, after as much time that does not count, in which the clocks go up."""

    def timed(calls):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            body()
        synchronize(device)
        return time.perf_counter() - start

    timed(1)
    together, warm = 1, 0.0
    while warm < least:
        taken = timed(together)
        warm += taken
        together *= 2 if taken < least / 4 else 1
    calls, taken = 0, 0.0
    while taken < least:
        taken += timed(together)
        calls += together
    return taken / calls


def measure(device, shape, least):
    """(forward, backward, kernel), seconds, of the kernel whose sum is smallest; shape: B, T, H, K, D."""
    B, T, H, K, D = shape
    # (B, T, heads, D) in memory, as a model's projections leave them.
    q, k, v = (torch.randn(B, T, n, D, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
               for n in (H, K, K))
    dout = torch.randn(B, T, H, D, device=device, dtype=torch.bfloat16).transpose(1, 2)
    measured = []
    for name, kernel in KERNELS.items():
        if name == "math" and measured:
            break
        try:
            with sdpa_kernel([kernel]):
                attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != K)
                forward = seconds_per_call(device, least, attend)
                out = attend()
                gradients = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
                measured.append((forward, seconds_per_call(device, least, gradients), name))
        except RuntimeError as error:  # this shape or machine is none of that kernel's
            print(f"PyTorch's {name} attention: {str(error).splitlines()[0]}", file=sys.stderr)
    return min(measured, key=lambda m: m[0] + m[1])


def begin(description, add_flags=lambda parser: None):
    """What each of these scripts begins with: it ends as other programs do, and knows its flags."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--gpu", action="store_true")
    add_flags(parser)
    s = parser.parse_args()
    torch.set_num_threads(s.threads)
    return s, "cuda" if s.gpu else "cpu"


def main():
    _, device = begin(__doc__)
    print("ready", flush=True)
    for line in sys.stdin:
        *shape, least = line.split()
        print(*measure(device, [int(n) for n in shape], float(least)), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
