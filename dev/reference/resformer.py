"""ResFormer in PyTorch: value residuals. Later layers mix the first layer's values, as projected there, into their own.

  V'_i = lambda1 * V_0 + lambda2 * V_i        i >= 1, layers from 0

  variant     lambda1, lambda2
  plus        scale * softmax(logits)[i-1] over all layers together, and a learned number per layer
  identity    1/2, 1/2
  constant    2, 1
  learnable   two learned numbers per layer
  sparse      5, 1 in the last three eighths of the layers only, at least one
  svformer    1, 0: these layers have no v_proj

last_k > 0 says how many of the last layers mix; the others are ordinary. Logits are kept for all of them.
"""
import dataclasses

import torch
from torch import nn

from .config import Config, check_choice
from .llama import Attention, Backbone, Llama, split_heads

FIXED = {"identity": (0.5, 0.5), "constant": (2, 1), "sparse": (5, 1), "svformer": (1, 0)}


@dataclasses.dataclass
class ResformerConfig(Config):
  arch: str = "resformer"
  variant: str = "plus"  # plus | identity | constant | learnable | sparse | svformer
  last_k: int = 0
  lambda_scale: str = "learned"  # learned | frozen: plus's scale; the optimizer leaves a frozen one alone
  lambda2: str = "learned"  # learned | frozen: plus's factor of a layer's own values


def mixes(config, layer):
  L = config.num_hidden_layers
  sparse = max(1, 3 * L // 8) if config.variant == "sparse" else 0
  return layer > 0 and layer >= L - (config.last_k or sparse or L)


class LayerLambdas(nn.Module):
  """What a layer learns of its own: lambda2, and of variant learnable lambda1 before it."""

  def __init__(self, names):
    super().__init__()
    self.names = names
    for name in names:
      self.register_parameter(name, nn.Parameter(torch.full((1,), 0.5)))

  def forward(self):
    return [getattr(self, name) for name in self.names]


class ResformerAttention(Attention):
  def __init__(self, config, layer):
    super().__init__(config, layer)
    check_choice("variant", config.variant, ("plus", "learnable", *FIXED))
    check_choice("lambda_scale", config.lambda_scale, ("learned", "frozen"))
    check_choice("lambda2", config.lambda2, ("learned", "frozen"))
    self.mixes = mixes(config, layer)
    learned = {"plus": ["lambda2"], "learnable": ["lambda1", "lambda2"]}.get(config.variant)
    if self.mixes and learned:
      self.value_residual_mixing = LayerLambdas(learned)
    if self.mixes and config.variant == "svformer":
      self.v_proj = None

  def lambdas(self, lambda1=None):
    """Of this layer; `lambda1` are those of all layers, for variant plus."""
    if self.config.variant == "plus":
      return lambda1[self.layer - 1], *self.value_residual_mixing()
    if self.config.variant == "learnable":
      return self.value_residual_mixing()
    return FIXED[self.config.variant]

  def project(self, x, shared):
    D = self.config.head_dim
    q, k = split_heads(self.q_proj(x), D), split_heads(self.k_proj(x), D)
    v = split_heads(self.v_proj(x), D) if self.v_proj is not None else 0
    if self.mixes:
      first, *lambda1 = shared
      mine, own = self.lambdas(*lambda1)
      v = mine * first + own * v
    return q, k, v

  def keep(self, values, shared):
    return (values, *shared) if self.layer == 0 else shared


class LambdaManager(nn.Module):
  """lambda1 of layers 1..L-1 in variant plus: each starts at L / (L-1)."""

  def __init__(self, L):
    super().__init__()
    self.lambda_scale = nn.Parameter(torch.full((1,), float(L)))
    self.lambda_logits = nn.Parameter(torch.zeros(L - 1))

  def forward(self):
    return self.lambda_scale * self.lambda_logits.softmax(0)


class ResformerBackbone(Backbone):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    if config.variant == "plus":
      self.lambda_manager = LambdaManager(config.num_hidden_layers)

  def begin(self, x, tokens):
    return (self.lambda_manager(),) if self.config.variant == "plus" else ()


class Resformer(Llama):
  config_class, backbone, attention = ResformerConfig, ResformerBackbone, ResformerAttention
