"""LIMe with key/value routing (version 2) in PyTorch: LLaMA whose layers attend to mixtures of all layers' heads.

Layer i (from 0) puts its K rotated key heads and K value heads into a slab that all layers share. From layer 1 on, it
attends to signed linear combinations of the (i+1)*K heads in the slab, with one matrix for keys and values:

  routed[k] = sum over layers m <= i and heads h of  W[k, m*K + h] * slab[m][h]          W = lime_router.weight

`routing` says which layers m layer i may read, its own always among them: "full" all; "last" the min(i+1, window) most
recent; "first" the first min(i+1, window) and its own. Entries of W outside are stored, but neither read nor trained.
"average" has no W: each head is the plain mean of that head over the layers; "own" has none either and is LLaMA.
"""
import dataclasses
import math

import torch
from torch import nn

from .config import Config, check_choice
from .llama import Attention, Llama


@dataclasses.dataclass
class LimeConfig(Config):
  arch: str = "lime"
  routing: str = "full"  # full | average | last | first | own
  window: int = 0  # the j of last-j and first-j
  kv_init: str = "uniform"  # uniform | normal: how k_proj and v_proj start
  router_init: str = "identity"  # identity | random: a new router's block of its own layer
  router_bound: str = "fan_in"  # fan_in | literal: of a new router's random entries
  decay: str = "usual"  # usual | routers: which weights an optimizer is to decay


class LimeAttention(Attention):
  def __init__(self, config, layer):
    super().__init__(config, layer)
    config = config.of(LimeConfig)
    check_choice("routing", config.routing, ("full", "average", "last", "first", "own"))
    check_choice("kv_init", config.kv_init, ("uniform", "normal"))
    check_choice("router_init", config.router_init, ("identity", "random"))
    check_choice("router_bound", config.router_bound, ("fan_in", "literal"))
    check_choice("decay", config.decay, ("usual", "routers"))
    if config.routing in ("last", "first") and config.window < 1:
      raise ValueError(f"routing {config.routing!r} needs a window of at least 1, got {config.window}")
    if self.has_router():
      K = config.num_key_value_heads
      self.lime_router = nn.Linear((layer + 1) * K, K, bias=False)

  def has_router(self):
    return self.layer > 0 and self.config.routing not in ("average", "own")

  def readable(self):
    """Which of the layers 0..i this one may read: i + 1 truth values."""
    i, window = self.layer, self.config.window
    if self.config.routing == "last":
      return [m > i - window for m in range(i + 1)]
    if self.config.routing == "first":
      return [m < window or m == i for m in range(i + 1)]
    return [True] * (i + 1)

  def leave(self, keys, values, shared):
    return (*shared, keys, values)

  def route(self, keys, values, shared):
    slab = shared[0::2], shared[1::2]  # keys and values of layers 0..i
    if self.layer == 0 or self.config.routing == "own":
      return keys, values
    if self.config.routing == "average":
      return tuple(torch.stack(heads).mean(0) for heads in slab)
    slabs = (torch.stack([heads * may for heads, may in zip(part, self.readable())], dim=1) for part in slab)
    return tuple(self.lime_router(heads.flatten(1, 2).movedim(1, -1)).movedim(-1, 1) for heads in slabs)

  def initialise(self):
    """Keys and values start uniform, the router as the identity on its own layer beside uniform noise on the others."""
    bound = 1 / math.sqrt(self.config.hidden_size)
    for heads in (self.k_proj, self.v_proj):
      if heads is not None and self.config.of(LimeConfig).kv_init == "uniform":  # beside svformer some layers have none
        nn.init.uniform_(heads.weight, -bound, bound)
    if self.has_router():
      K = self.config.num_key_value_heads
      bound = math.sqrt(3 / (K * sum(self.readable()))) * (K if self.config.router_bound == "literal" else 1)
      nn.init.uniform_(self.lime_router.weight, -bound, bound)
      if self.config.router_init == "identity":
        self.lime_router.weight[:, -K:] = torch.eye(K)


class Lime(Llama):
  config_class, attention = LimeConfig, LimeAttention
