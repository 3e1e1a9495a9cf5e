"""MoDA in PyTorch: a token attends to earlier tokens and, in the same softmax, to slots of its own in lower layers.

  o_t = softmax over j <= t of  q_t . k_j / sqrt(D)  and over slots s of  q_t . kd_s / sqrt(D),  applied to v_j and vd_s

Layer u leaves each token one slot with the keys and values of its attention, and with ffn_kv a second one:

  kd = rotate(norm(Wk x)), vd = Wv x        x: the normed input of its feed-forward; the norm is there with qk_norm

A layer from depth_start on reads the slots of all lower layers, or of the depth_window ones right below it. Slots
belong to the token that attends: a cache for generation keeps none of them.
"""
import dataclasses

import torch
from torch import nn

from .config import Config
from .llama import Attention, Layer, Llama, RMSNorm, rotate, split_heads


@dataclasses.dataclass
class ModaConfig(Config):
  arch: str = "moda"
  depth_start: int = 1
  depth_window: int = 0  # 0: all lower layers
  ffn_kv: bool = True


def layers_below(config, layer):
  """How many, right below it, the layer reads."""
  if layer < config.depth_start:
    return 0
  return min(config.depth_window or layer, layer)


def is_read(config, layer):
  """By any layer above it."""
  return any(layers_below(config, v) >= v - layer for v in range(layer + 1, config.num_hidden_layers))


class ModaAttention(Attention):
  def leave(self, keys, values, shared):
    return (*shared, keys, values) if is_read(self.config, self.layer) else shared

  def slots(self, shared):
    """Keys and values (B, K, T, slots, D) of the layers that this one reads: the last ones that left any."""
    count = layers_below(self.config, self.layer) * (4 if self.config.ffn_kv else 2)
    read = shared[len(shared) - count :]
    return torch.stack(read[::2], dim=3), torch.stack(read[1::2], dim=3)

  def attend(self, q, k, v, visible, scale, shared):
    if layers_below(self.config, self.layer) == 0:
      return super().attend(q, k, v, visible, scale, shared)
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in self.slots(shared))
    sequence = (q @ k.transpose(2, 3)).masked_fill(~visible, -torch.inf)  # (B, H, T, S)
    depth = (keys @ q[..., None])[..., 0]  # (B, H, T, slots)
    logits = scale * torch.cat([sequence, depth], dim=-1)
    weights = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    of_sequence, of_depth = weights.split([k.shape[2], keys.shape[3]], dim=-1)
    return of_sequence @ v + (of_depth[..., None, :] @ values)[..., 0, :]


class ModaLayer(Layer):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    self.leaves_ffn = config.ffn_kv and is_read(config, layer)
    if not self.leaves_ffn:
      return
    outputs = config.num_key_value_heads * config.head_dim
    self.mlp.depth_k_proj = nn.Linear(config.hidden_size, outputs, bias=False)
    self.mlp.depth_v_proj = nn.Linear(config.hidden_size, outputs, bias=False)
    if config.qk_norm:
      self.mlp.depth_k_norm = RMSNorm(config.head_dim, config.qk_norm_eps)

  def leave(self, inner, shared, step):
    if not self.leaves_ffn:
      return shared
    config, mlp = self.config, self.mlp
    keys, values = (split_heads(proj(inner), config.head_dim) for proj in (mlp.depth_k_proj, mlp.depth_v_proj))
    if config.qk_norm:
      keys = mlp.depth_k_norm(keys)
    if config.backbone == "llama":
      keys = rotate(keys, step.positions, config.rope_theta, config.rope_scaling)
    return (*shared, keys, values)


class Moda(Llama):
  config_class, layer, attention = ModaConfig, ModaLayer, ModaAttention
