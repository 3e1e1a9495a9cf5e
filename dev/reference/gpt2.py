"""GPT-2 in PyTorch: what it has in the place of LLaMA's parts, and how its tensors stand in files.

Its block is LLaMA's with a LayerNorm for each RMSNorm, no rotation, and a GELU feed-forward of two layers; the stream
starts as embedding plus learned position. `bias` gives every linear layer and norm of the backbone a bias. The modules
carry LLaMA's names, so that what connects layers across depth works on both (they ask Config.backbone); files carry
Hugging Face's, where linear weights are (in, out) and queries, keys and values are one tensor.
"""
import re

import torch
import torch.nn.functional as F
from torch import nn

ACTIVATIONS = {"gelu_new": "tanh", "gelu": "none"}  # F.gelu's words


class LayerNorm(nn.Module):
  """y = weight * (x - mean) / sqrt(variance + eps) + bias, over the last dimension, at least in float32."""

  def __init__(self, width, eps, bias):
    super().__init__()
    self.weight = nn.Parameter(torch.ones(width))
    self.bias = nn.Parameter(torch.zeros(width)) if bias else None
    self.eps = eps

  def forward(self, x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide - wide.mean(-1, keepdim=True)
    y = self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x)
    return y if self.bias is None else y + self.bias


class Gpt2MLP(nn.Module):
  """GELU."""

  def __init__(self, width, inner, activation, bias):
    super().__init__()
    self.approximate = ACTIVATIONS[activation]
    self.up_proj = nn.Linear(width, inner, bias=bias)
    self.down_proj = nn.Linear(inner, width, bias=bias)

  def forward(self, x):
    return self.down_proj(F.gelu(self.up_proj(x), approximate=self.approximate))


TOP = {"model.embed_tokens": "transformer.wte", "model.embed_positions": "transformer.wpe",
       "model.norm": "transformer.ln_f"}
BLOCK = {"input_layernorm": "ln_1", "self_attn.q_proj": "attn.c_attn", "self_attn.k_proj": "attn.c_attn",
         "self_attn.v_proj": "attn.c_attn", "self_attn.o_proj": "attn.c_proj", "post_attention_layernorm": "ln_2",
         "input_layernorm_2": "ln_1_2", "post_attention_layernorm_2": "ln_2_2",
         "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}


def file_name(name):
  """Of a module's tensor in files. What a connection adds keeps its name."""
  stem, _, last = name.rpartition(".")
  if stem in TOP:
    return f"{TOP[stem]}.{last}"
  block = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
  if block is None or block[2] not in BLOCK:
    return name
  return ".".join(("transformer", "h", block[1], BLOCK[block[2]], last))


def transposed(name):
  """Whether a file has it as (in, out)."""
  return name.endswith("_proj.weight") and file_name(name) != name


def to_file(tensors):
  """{module's name: tensor} as {file's name: tensor}."""
  parts = {}
  for name, tensor in tensors.items():
    parts.setdefault(file_name(name), []).append(tensor.T if transposed(name) else tensor)
  return {name: torch.cat(list(some), dim=-1) for name, some in parts.items()}


def from_file(tensors, shapes):
  """The way back, for modules' tensors of these shapes, {name: shape}. A KeyError names what is missing."""
  taken, found = {}, {}
  for name, shape in shapes.items():
    source = file_name(name)
    begin = taken.get(source, 0)
    outputs = shape[0] if transposed(name) else shape[-1]
    part = tensors[source][..., begin : begin + outputs]
    taken[source] = begin + outputs
    found[name] = part.T.contiguous() if transposed(name) else part
  for name, tensor in tensors.items():
    if taken.get(name) != tensor.shape[-1]:
      raise ValueError(f"{name} has {tensor.shape[-1]} columns, of which the model takes {taken.get(name, 0)}")
  return found
