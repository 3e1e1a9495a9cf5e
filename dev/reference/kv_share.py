"""Keys and values shared across layers in PyTorch: only some layers, the owners, have keys and values of their own.

The layers above an owner, up to the next one, attend with their own queries to its keys, normed and rotated as they are
there, and to its values. "cla": every cla_factor-th layer is an owner; "suffix": all but the last
num_kv_shared_layers; "list": those in kv_owners.
"""
import dataclasses

from .config import Config, check_choice
from .llama import Attention, Llama, split_heads


@dataclasses.dataclass
class KvShareConfig(Config):
  arch: str = "kv_share"
  sharing: str = "cla"  # cla | suffix | list
  cla_factor: int = 2
  num_kv_shared_layers: int = 0
  kv_owners: list = dataclasses.field(default_factory=lambda: [0])


def is_owner(config, layer):
  check_choice("sharing", config.sharing, ("cla", "suffix", "list"))
  if config.sharing == "cla":
    return layer % config.cla_factor == 0
  if config.sharing == "suffix":
    return layer < config.num_hidden_layers - config.num_kv_shared_layers
  return layer in config.kv_owners


class KvShareAttention(Attention):
  def __init__(self, config, layer):
    super().__init__(config, layer)
    self.owner = is_owner(config, layer)
    if not self.owner:
      del self.k_proj, self.v_proj
      if config.qk_norm:
        del self.k_norm

  def project(self, x, shared):
    if self.owner:
      return super().project(x, shared)
    return split_heads(self.q_proj(x), self.config.head_dim), None, None

  def leave(self, keys, values, shared):
    return (keys, values) if self.owner else shared

  def route(self, keys, values, shared):
    return shared


class KvShare(Llama):
  config_class, attention = KvShareConfig, KvShareAttention
