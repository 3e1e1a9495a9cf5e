"""Skip-layer attention (SLA) and simplified adaptive layerwise attention (ALA) in PyTorch.

Some query heads attend to the keys and values of an earlier layer, computed there already: rotated, and normed where
q/k norms are on. A query head reads the key/value head of the same number as in its own layer. No parameters are added.

  sla   in every layer i >= distance the first `heads` query heads read layer i - distance
  ala   in the last layer, query head j reads layer L-1 - stride * (j mod M): M = ceil(L / stride) layers in turn; with
        include_self false the last layer itself is left out
"""
import dataclasses

import torch

from .config import Config
from .llama import Attention, Llama


@dataclasses.dataclass
class SlaConfig(Config):
  arch: str = "sla"
  distance: int = 0  # 0: three quarters of L, rounded down
  heads: int = 0  # 0: half of H, rounded down


@dataclasses.dataclass
class AlaConfig(Config):
  arch: str = "ala"
  stride: int = 2
  include_self: bool = True


class SkipAttention(Attention):
  def source(self, head):
    """The layer whose keys and values a query head reads."""
    raise NotImplementedError

  def leave(self, keys, values, shared):
    return (*shared, keys, values)

  def route(self, keys, values, shared):
    H, K = self.config.num_attention_heads, self.config.num_key_value_heads
    read = [(self.source(head), head // (H // K)) for head in range(H)]
    return tuple(torch.stack([part[layer][:, k] for layer, k in read], dim=1) for part in (shared[0::2], shared[1::2]))


class SlaAttention(SkipAttention):
  def source(self, head):
    distance = self.config.distance or 3 * self.config.num_hidden_layers // 4
    heads = self.config.heads or self.config.num_attention_heads // 2
    return self.layer - distance if self.layer >= distance and head < heads else self.layer


class AlaAttention(SkipAttention):
  def source(self, head):
    L, stride = self.config.num_hidden_layers, self.config.stride
    layers = list(range(L - 1, -1, -stride))
    if not self.config.include_self:
      layers = layers[1:] or layers
    return layers[head % len(layers)] if self.layer == L - 1 else self.layer


class Sla(Llama):
  config_class, attention = SlaConfig, SlaAttention


class Ala(Llama):
  config_class, attention = AlaConfig, AlaAttention
