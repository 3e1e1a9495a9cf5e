"""Embedding shortcuts in PyTorch: the embedding again before every layer, values from tables, a part of the middle off.

Before layer i the stream becomes resid[i] * x + x0[i] * embedding. A layer with a table adds to its values the row of
its token, times a gate for each head that the first channels of its input decide about. The final norm reads
x - backout * (x after layer L // 2).
"""
import dataclasses

import torch
from torch import nn

from .config import Config, check_choice
from .llama import Attention, Backbone, Layer, Llama, unit_rms


@dataclasses.dataclass
class ShortcutsConfig(Config):
  arch: str = "shortcuts"
  value_embeds: str = "alternate"  # alternate | none | list
  value_layers: list = dataclasses.field(default_factory=list)
  gate_channels: int = 0  # 0: 12, or the width where that is smaller
  gate_scale: float = 3.0
  resid: bool = True
  x0: bool = True
  backout: bool = True
  embed_norm: bool = False


def has_table(config, layer):
  check_choice("value_embeds", config.value_embeds, ("alternate", "none", "list"))
  if config.value_embeds == "alternate":
    return layer % 2 == (config.num_hidden_layers - 1) % 2
  return config.value_embeds == "list" and layer in config.value_layers


class ShortcutsAttention(Attention):
  def __init__(self, config, layer):
    super().__init__(config, layer)
    if has_table(config, layer):
      channels = config.gate_channels or min(12, config.hidden_size)
      self.ve_gate = nn.Linear(channels, config.num_key_value_heads, bias=False)

  def initialise(self):
    if hasattr(self, "ve_gate"):
      nn.init.uniform_(self.ve_gate.weight, 0, 0.02)

  def project(self, x, shared):
    q, k, v = super().project(x, shared)
    if hasattr(self, "ve_gate"):
      gate = self.config.gate_scale * self.ve_gate(x[..., : self.ve_gate.in_features]).sigmoid()  # (B, T, K)
      rows = shared[0].unflatten(-1, (-1, self.config.head_dim))  # (B, T, K, D)
      v = v + (gate[..., None] * rows).transpose(1, 2)
    return q, k, v


class ShortcutsLayer(Layer):
  """shared: the factors of the stream and of its start, None where there are none, the start, and a table's rows."""

  def forward(self, x, shared, step):
    own, first, start, *rows = shared
    if own is not None:
      x = own.to(x.device) * x
    if first is not None:
      x = x + (first * start).to(x.device)
    return super().forward(x, rows, step)


class ShortcutsBackbone(Backbone):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    L, width = config.num_hidden_layers, config.num_key_value_heads * config.head_dim
    if config.resid:
      self.resid_lambdas = nn.Parameter(torch.linspace(1.15, 1.05, L))
    if config.x0:
      self.x0_lambdas = nn.Parameter(torch.linspace(0.2, 0.05, L))
    if config.backout:
      self.backout_lambda = nn.Parameter(torch.full((1,), 0.2))
    self.value_embeds = nn.ModuleDict(
      {str(i): nn.Embedding(config.vocab_size, width) for i in range(L) if has_table(config, i)})

  def initialise(self):
    bound = (3 / self.config.hidden_size) ** 0.5
    for table in self.value_embeds.values():
      nn.init.uniform_(table.weight, -bound, bound)

  def forward(self, tokens, step):
    config, x = self.config, self.embed(tokens, step)
    if config.embed_norm:
      x = unit_rms(x, config.rms_norm_eps)
    start, anchor = x, None
    for i, layer in enumerate(self.layers):
      x, anchor = self.before(i, x, anchor)
      own = self.resid_lambdas[i] if config.resid else None
      first = self.x0_lambdas[i] if config.x0 else None
      rows = (self.value_embeds[str(i)](tokens),) if has_table(config, i) else ()
      x, _ = layer(x, (own, first, start, *rows), step)
      if i == len(self.layers) // 2:
        middle = x
      x = self.behind(i, x, anchor)
    return self.norm(x - self.backout_lambda.to(x.device) * middle.to(x.device) if config.backout else x)


class Shortcuts(Llama):
  config_class, backbone = ShortcutsConfig, ShortcutsBackbone
  layer, attention = ShortcutsLayer, ShortcutsAttention
