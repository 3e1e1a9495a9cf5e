"""Depth-Attention in PyTorch: a layer's values become a mixture with those of lower layers for the same token.

For every token and key/value head, with m the mean of the queries of its group:

  v'_n = sum over j of  a_j * v'_j  +  a_n * v_n        a = softmax over j, n of  m . k_j / sqrt(D)

The sources j are the lower layers that are multiples of depth_stride, and the depth_recent ones right below; layers
below depth_start have none. Queries and keys are normed and rotated; the cache keeps v'.
"""
import dataclasses
import math

import torch

from .config import Config
from .llama import Attention, Llama


@dataclasses.dataclass
class DepthAttentionConfig(Config):
  arch: str = "depth_attention"
  depth_start: int = 1
  depth_stride: int = 0  # 0: half the number of layers
  depth_recent: int = 0


def lower_layers(config, layer):
  if layer < config.depth_start:
    return []
  stride = config.depth_stride or max(1, config.num_hidden_layers // 2)
  return [j for j in range(layer) if j % stride == 0 or j >= layer - config.depth_recent]


class DepthAttentionAttention(Attention):
  def mix(self, q, k, v, shared):
    below = lower_layers(self.config, self.layer)
    if not below:
      return v
    keys = torch.stack([shared[2 * j] for j in below] + [k])  # (S, B, K, T, D)
    values = torch.stack([shared[2 * j + 1] for j in below] + [v])
    mean = q.unflatten(1, (k.shape[1], -1)).mean(2)  # (B, K, T, D)
    weights = ((mean * keys).sum(-1, keepdim=True) / math.sqrt(self.config.head_dim)).softmax(0)
    return (weights * values).sum(0)

  def leave(self, keys, values, shared):
    return (*shared, keys, values)


class DepthAttention(Llama):
  config_class, attention = DepthAttentionConfig, DepthAttentionAttention
