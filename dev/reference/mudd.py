"""MUDDFormer in PyTorch: queries, keys, values and residual stream each read their own mixture of all layers' outputs.

X_0 is the embeddings, X_n what block n = 1..L makes of its four inputs. After block n the depth-aggregate module mixes
X_0..X_n into the four inputs ("ways": Q, K, V, R) of the next block; after the last block there is R alone:

  weights = static_weight + w2 gelu(w1 unit_rms(X_n))         for every token (ways, n+1)
  way c   = sum over l of  weights[c, l] * X_l

With norm "prepost" each X_l is normed before the sum and each way after it, and X_n is added. The first block reads X_0
four times. intermediate_sizes, where given, sets the feed-forward width of each layer.
"""
import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn

from .config import Config, check_choice
from .llama import Attention, Backbone, Layer, Llama, RMSNorm, backbone_norm, split_heads, unit_rms


@dataclasses.dataclass
class MuddConfig(Config):
  arch: str = "mudd"
  norm: str = "prepost"  # prepost | none
  intermediate_sizes: list = dataclasses.field(default_factory=list)  # empty: intermediate_size everywhere
  w1_init: str = "fan_in"  # fan_in | literal: spread 1/sqrt(C) or 1/C

  def one_stream(self):
    return False


class DepthAggregate(nn.Module):
  def __init__(self, config, layer):
    super().__init__()
    check_choice("norm", config.norm, ("prepost", "none"))
    self.eps = config.rms_norm_eps
    C, sources, ways = config.hidden_size, layer + 2, 4 if layer < config.num_hidden_layers - 1 else 1
    self.w1 = nn.Linear(C, ways * sources, bias=False)
    self.w2 = nn.Linear(ways * sources, ways * sources, bias=False)
    self.static_weight = nn.Parameter(torch.zeros(ways, sources))
    check_choice("w1_init", config.w1_init, ("fan_in", "literal"))
    self.w1_std = 1 / C if config.w1_init == "literal" else 1 / math.sqrt(C)
    self.prepost = config.norm == "prepost"
    if self.prepost:
      self.pre_da_norms = nn.ModuleList(RMSNorm(C, self.eps) for _ in range(sources))
      self.post_da_norms = nn.ModuleList(RMSNorm(C, self.eps) for _ in range(ways))

  def forward(self, outputs):  # (X_0, ..., X_n), each (B, T, C)
    newest = outputs[-1]
    weights = self.w2(F.gelu(self.w1(unit_rms(newest, self.eps)))).unflatten(-1, self.static_weight.shape)
    if self.prepost:
      outputs = [norm(x) for norm, x in zip(self.pre_da_norms, outputs)]
    mixed = torch.einsum("btcl,lbtd->cbtd", weights + self.static_weight, torch.stack(outputs))
    return tuple(norm(way) + newest for norm, way in zip(self.post_da_norms, mixed)) if self.prepost else tuple(mixed)

  def initialise(self):
    """As if there were no mixing."""
    nn.init.normal_(self.w1.weight, std=self.w1_std)
    nn.init.zeros_(self.w2.weight)
    if self.prepost:
      for norm in self.post_da_norms:
        nn.init.constant_(norm.weight, 1e-3)
    else:
      self.static_weight[:, -1] = 1


class MuddAttention(Attention):
  def project(self, x, shared):  # x: one (B, T, C) each for queries, keys and values
    pairs = zip((self.q_proj, self.k_proj, self.v_proj), x)
    return tuple(split_heads(proj(way), self.config.head_dim) for proj, way in pairs)


class MuddLayer(Layer):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    del self.input_layernorm
    for way in "qkv":
      setattr(self, f"input_layernorm_{way}", backbone_norm(config))
    self.da = DepthAggregate(config, layer)

  def inner_width(self, config, layer):
    if not config.intermediate_sizes:
      return config.intermediate_size
    if len(config.intermediate_sizes) != config.num_hidden_layers:
      raise ValueError(f"{len(config.intermediate_sizes)} intermediate_sizes, {config.num_hidden_layers} layers")
    return config.intermediate_sizes[layer]

  def sublayers(self, ways, outputs, shared, step):
    q, k, v, x = ways
    normed = self.input_layernorm_q(q), self.input_layernorm_k(k), self.input_layernorm_v(v)
    y, shared = self.self_attn(normed, shared, step)
    x = x + y
    inner = self.post_attention_layernorm(x)
    outputs = (*outputs, x + self.mlp(inner))  # X_0, ..., X_n
    return self.da(outputs), outputs, self.leave(inner, shared, step)


class MuddBackbone(Backbone):
  def forward(self, tokens, step):
    x = self.embed(tokens, step)
    ways, outputs, shared = (x, x, x, x), (x,), self.begin(x, tokens)
    for layer in self.layers:
      ways, outputs, shared = layer(ways, outputs, shared, step)
    return self.norm(ways[-1])


class Mudd(Llama):
  config_class, backbone, layer, attention = MuddConfig, MuddBackbone, MuddLayer, MuddAttention
