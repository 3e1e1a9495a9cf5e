"""LIMe version 1 in PyTorch: keys and values are made from mixtures of all earlier residual streams, one for each head.

Layer i >= 1 (from 0) sees the streams X_0 (the embeddings), ..., X_i, each normed with the layer's own lime_layernorm.
Key/value head h reads its own convex combination of them, and its rows of k_proj and v_proj project that one:

  Z_h = sum over m <= i of  weights[h, m] * normed(X_m)        K_h = Z_h Wk_h^T        V_h = Z_h Wv_h^T

  lime_static    weights = softmax over m of lime_router.weight  (K, i+1), the same for all tokens
  lime_dynamic   weights = softmax over m of a projection of the token's own normed(X_i)

Queries read the stream as ever. With fewer key/value heads than query heads there is one mixture per key/value head.
top_p < 1 prunes static weights (see keep_top) and divides what is left by its sum, unless top_p_renormalize is false.
"""
import dataclasses
import math

import torch
from torch import nn

from .config import Config, check_choice
from .llama import Attention, Layer, Llama, backbone_norm, split_heads


@dataclasses.dataclass
class LimeDynamicConfig(Config):
  arch: str = "lime_dynamic"
  kv_init: str = "literal"  # literal | fan_in: how k_proj and v_proj start
  decay: str = "usual"  # usual | routers: which weights an optimizer is to decay


@dataclasses.dataclass
class LimeStaticConfig(LimeDynamicConfig):
  arch: str = "lime_static"
  top_p: float = 1.0
  top_p_renormalize: bool = True  # what is kept is divided by its sum


def keep_top(weights, p):
  """Which weights (heads, m) to keep: in descending order, all up to the one that brings the sum above p.

  Of equal weights the larger m comes first.
  """
  backwards = weights.detach().flip(-1)
  ordered, index = backwards.sort(dim=-1, descending=True, stable=True)
  before = torch.cat([torch.zeros_like(ordered[..., :1]), ordered.cumsum(-1)[..., :-1]], dim=-1)
  return torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before <= p).flip(-1)


class StaticRouter(nn.Module):
  def __init__(self, config, layer):
    super().__init__()
    self.top_p, self.renormalize = config.top_p, config.top_p_renormalize
    self.weight = nn.Parameter(0.1 * torch.randn(config.num_key_value_heads, layer + 1))

  def forward(self, newest):  # (B, T, C)
    weights = self.weight.softmax(-1)  # (K, i+1)
    if self.top_p < 1:
      weights = weights * keep_top(weights, self.top_p)
      if self.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.expand(*newest.shape[:2], -1, -1)


class MixedStreamsAttention(Attention):
  """shared: the streams X_0, ..., X_(i-1). In project it is a pair: the streams up to X_i, and these normed."""

  def __init__(self, config, layer):
    super().__init__(config, layer)
    options = config.of(LimeDynamicConfig)
    check_choice("kv_init", options.kv_init, ("literal", "fan_in"))
    check_choice("decay", options.decay, ("usual", "routers"))
    if layer > 0:
      self.k_proj.bias = self.v_proj.bias = None  # a GPT-2's would add nothing to what o_proj's can

  def weights(self, newest):
    """Of X_0, ..., X_i for each head: (B, T, K, i+1). newest: X_i, normed."""
    raise NotImplementedError

  def project(self, x, shared):
    if self.layer == 0:
      return super().project(x, shared)
    _, streams = shared
    D, weights = self.config.head_dim, self.weights(streams[-1])
    # Mixing what was projected is the same as projecting what was mixed.
    k, v = (torch.einsum("btkm,mbtkd->bktd", weights, proj(torch.stack(streams)).unflatten(-1, (-1, D)))
            for proj in (self.k_proj, self.v_proj))
    return split_heads(self.q_proj(x), D), k, v

  def keep(self, values, shared):
    streams, _ = shared
    return streams

  def initialise(self):
    """The published bound takes all heads together for the fan-in, which makes first keys and values very small."""
    if self.layer > 0:
      literal = self.config.of(LimeDynamicConfig).kv_init == "literal"
      fan_in = self.k_proj.weight.numel() if literal else self.config.hidden_size
      for proj in (self.k_proj, self.v_proj):
        nn.init.uniform_(proj.weight, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))


class LimeStaticAttention(MixedStreamsAttention):
  def __init__(self, config, layer):
    super().__init__(config, layer)
    if layer > 0:
      self.lime_router = StaticRouter(config, layer)

  def weights(self, newest):
    return self.lime_router(newest)


class LimeDynamicAttention(MixedStreamsAttention):
  def __init__(self, config, layer):
    super().__init__(config, layer)
    if layer > 0:
      if not hasattr(self, "lime_router"):  # a lime beside it has one
        self.lime_router = nn.Module()
      self.lime_router.proj = nn.Linear(config.hidden_size, config.num_key_value_heads * (layer + 1), bias=False)

  def weights(self, newest):
    return self.lime_router.proj(newest).unflatten(-1, (-1, self.layer + 1)).softmax(-1)


class MixedStreamsLayer(Layer):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    if layer > 0:
      self.lime_layernorm = backbone_norm(config, bias=False)

  def observe(self, x, shared):
    streams = (*shared, x)  # X_0, ..., X_i
    return streams, tuple(self.lime_layernorm(stream) for stream in streams) if self.layer > 0 else ()


class LimeStatic(Llama):
  config_class, layer, attention = LimeStaticConfig, MixedStreamsLayer, LimeStaticAttention
  observes_stream = True


class LimeDynamic(Llama):
  config_class, layer, attention = LimeDynamicConfig, MixedStreamsLayer, LimeDynamicAttention
  observes_stream = True
