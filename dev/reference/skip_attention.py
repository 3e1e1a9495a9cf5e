"""Skip-layer attention (SLA) and simplified adaptive layerwise attention (ALA) in PyTorch.

Some query heads attend to the keys and values of an earlier layer, computed there already: rotated, and normed where
q/k norms are on. A query head reads the key/value head of the same number as in its own layer. No parameters are added.

  sla   in every layer i >= distance the first `heads` query heads read layer i - distance
  ala   in the last layer, query head j reads layer L-1 - stride * (j mod M): M = ceil(L / stride) layers in turn
"""
import dataclasses

import torch

from .llama import Attention, Config, Llama


@dataclasses.dataclass
class SlaConfig(Config):
  arch: str = "sla"
  distance: int = 0  # 0: three quarters of L, rounded down
  heads: int = 0  # 0: half of H, rounded down


@dataclasses.dataclass
class AlaConfig(Config):
  arch: str = "ala"
  stride: int = 2


class SkipAttention(Attention):
  def source(self, head):
    """The layer whose keys and values a query head reads."""
    raise NotImplementedError

  def route(self, keys, values, shared):
    shared.append((keys, values))
    H, K = self.config.num_attention_heads, self.config.num_key_value_heads
    read = [(self.source(head), head // (H // K)) for head in range(H)]
    return tuple(torch.stack([shared[layer][part][:, k] for layer, k in read], dim=1) for part in (0, 1))


class SlaAttention(SkipAttention):
  def source(self, head):
    distance = self.config.distance or 3 * self.config.num_hidden_layers // 4
    heads = self.config.heads or self.config.num_attention_heads // 2
    return self.layer - distance if self.layer >= distance and head < heads else self.layer


class AlaAttention(SkipAttention):
  def source(self, head):
    L, stride = self.config.num_hidden_layers, self.config.stride
    return L - 1 - stride * (head % -(-L // stride)) if self.layer == L - 1 else self.layer


class Sla(Llama):
  config_class, attention = SlaConfig, SlaAttention


class Ala(Llama):
  config_class, attention = AlaConfig, AlaAttention
