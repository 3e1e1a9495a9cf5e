"""Relay in PyTorch: values are handed from layer to layer, each head of each token through its own gate.

  V'_i[h] = V_i[h] + gate[h] * V'_{i-1}[h]        gate = relu(relay_gate(x))        i >= 1, layers from 0

x is what the layer's queries, keys and values are projected from. The example of docs/add-a-connection.md.
"""
import dataclasses

import torch.nn.functional as F
from torch import nn

from .config import Config
from .llama import Attention, Llama


@dataclasses.dataclass
class RelayConfig(Config):
  arch: str = "relay"


class RelayAttention(Attention):
  def __init__(self, config, layer):
    super().__init__(config, layer)
    if layer > 0:
      self.relay_gate = nn.Linear(config.hidden_size, config.num_key_value_heads, bias=False)

  def project(self, x, shared):
    q, k, v = super().project(x, shared)
    if self.layer > 0:
      gate = F.relu(self.relay_gate(x))  # (B, T, K)
      v = v + gate.transpose(1, 2)[..., None] * shared[0]
    return q, k, v

  def keep(self, values, shared):
    return (values,)


class Relay(Llama):
  config_class, attention = RelayConfig, RelayAttention
