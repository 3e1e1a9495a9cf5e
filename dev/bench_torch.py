"""PyTorch's side of `bench steps`: the training step of the same LLaMA or GPT-2, at good settings of PyTorch.

The same model, operations and batch; weights, moments and gradients in fp32. --bf16: activations, the residual stream
too, in bf16, and weights cast to bf16 where a product reads them (autocast), which crossply keeps from step to step.
Fused AdamW, one pass of clipping, gradients freed instead of zeroed; torch.compile in its default mode: no other
(reduce-overhead, max-autotune) has been tried. On a GPU the attention is the faster of cuDNN's and flash for the shape.
Each step reads its loss, so the host waits once; ours then does not wait for the update.

Speaks lines on its standard streams: prints `ready`, then for each number n it reads runs n steps and prints their
seconds and the peak memory in MiB: resident, or allocated on the GPU. Used by dev/bench_steps.cpp; needs PyTorch 2.
"""

import contextlib
import logging
import resource
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench_torch_attention import KERNELS, begin, measure


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-5)  # of one type: the fused kernel


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s, D = s, s.width // s.heads
        self.norm1, self.norm2 = Norm(s.width), Norm(s.width)
        self.project = nn.Linear(s.width, (s.heads + 2 * s.kv_heads) * D, bias=False)
        self.out = nn.Linear(s.heads * D, s.width, bias=False)
        self.expand = nn.Linear(s.width, 2 * s.ffn, bias=False)
        self.down = nn.Linear(s.ffn, s.width, bias=False)

    def forward(self, x, cos, sin):
        s, (B, T, C) = self.s, x.shape
        D = C // s.heads
        qkv = self.project(self.norm1(x)).view(B, T, s.heads + 2 * s.kv_heads, D).transpose(1, 2)
        q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # of q's type, or each product would be in fp32
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.heads != s.kv_heads)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        gate, up = self.expand(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Llama(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.vocab, self.bf16, D = s.vocab, s.bf16, s.width // s.heads
        self.embed = nn.Embedding(s.vocab, s.width)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm, self.head = Norm(s.width), nn.Linear(s.width, s.vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        angle = torch.outer(torch.arange(s.seq).float(), 10000.0 ** (-torch.arange(0, D, 2).float() / D))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        if self.bf16:
            x = x.to(torch.bfloat16)  # autocast would keep the residual stream in fp32
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, self.vocab), targets.view(-1))


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class Gpt2Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads = s.heads
        self.norm1, self.norm2 = LayerNorm(s.width), LayerNorm(s.width)
        self.project, self.out = nn.Linear(s.width, 3 * s.width), nn.Linear(s.width, s.width)
        self.expand, self.down = nn.Linear(s.width, s.ffn), nn.Linear(s.ffn, s.width)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.project(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.expand(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.vocab, self.bf16 = s.vocab, s.bf16
        self.embed, self.positions = nn.Embedding(s.vocab, s.width), nn.Embedding(1024, s.width)
        self.blocks = nn.ModuleList(Gpt2Block(s) for _ in range(s.layers))
        self.norm = LayerNorm(s.width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        if self.bf16:
            x = x.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.embed.weight).view(-1, self.vocab), targets.view(-1))


def peak_resident_mib():
    # Not of getrusage where there is another way: its figure survives exec, so the parent's memory would count.
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def add_flags(parser):
    for name in ("width", "layers", "heads", "kv-heads", "ffn", "vocab", "seq", "batch"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--gpt2", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--bf16", action="store_true")


def main():
    s, device = begin(__doc__, add_flags)
    logging.disable(logging.WARNING)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = (Gpt2 if s.gpt2 else Llama)(s).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_of = torch.compile(model) if s.compile else model
    tokens, targets = (torch.randint(0, s.vocab, (s.batch, s.seq), device=device) for _ in range(2))

    kernels = contextlib.ExitStack()  # from here to the end
    if s.gpu:
        *_, name = measure(device, (s.batch, s.seq, s.heads, s.kv_heads, s.width // s.heads), 0.05)
        print(f"PyTorch's attention: {name}", file=sys.stderr, flush=True)
        kernels.enter_context(sdpa_kernel([KERNELS[name], SDPBackend.MATH]))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def step():
        with torch.autocast(device, dtype=torch.bfloat16) if s.bf16 else contextlib.nullcontext():
            loss = loss_of(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    for _ in range(2):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            step()
        if s.gpu:
            torch.cuda.synchronize()  # the last update
        seconds = time.perf_counter() - start
        print(seconds, torch.cuda.max_memory_allocated() / 2**20 if s.gpu else peak_resident_mib(), flush=True)


if __name__ == "__main__":
    main()
