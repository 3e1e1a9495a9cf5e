"""Hyper-connections in PyTorch: E = rate residual streams, and learned mixtures in place of each residual addition.

Every sublayer f has its own alpha (E, E+1) and beta (E). Column 0 of alpha reads the sublayer's input out of the
streams, the others mix the streams; beta writes the output back:

  mixed[j]   = sum over streams i of  alpha[i, j] * stream[i]        j = 0..E
  stream'[i] = mixed[i+1] + beta[i] * f(mixed[0])

Dynamic connections add to alpha and beta a small function of each token's normed streams. All streams start as the
embeddings; the final norm reads their sum.
"""
import dataclasses
import math

import torch
from torch import nn

from .config import Config, check_choice
from .llama import Backbone, Layer, Llama, RMSNorm


@dataclasses.dataclass
class HyperConfig(Config):
  arch: str = "hyper"
  rate: int = 4  # E
  dynamic: bool = True
  norm: str = "layernorm_no_affine"  # of the dynamic part: layernorm_no_affine | layernorm | rmsnorm
  dynamic_norm_eps: float = 0.0  # that norm's epsilon; 0: NORMS' own
  prenorm: str = "layernorm_no_affine"  # of the sublayers: layernorm_no_affine | rmsnorm, the backbone's
  layer_index: str = "layer"  # layer | sublayer: what says which stream a sublayer reads at first
  output_init_scale: bool = False  # o_proj and down_proj start smaller by sqrt(E)

  def streams(self):
    return self.rate

  def one_stream(self):
    return False


NORMS = {
  "layernorm_no_affine": lambda width, eps=1e-5: nn.LayerNorm(width, eps=eps, elementwise_affine=False),
  "layernorm": lambda width, eps=1e-5: nn.LayerNorm(width, eps=eps),
  "rmsnorm": lambda width, eps=1e-6: RMSNorm(width, eps=eps),
}


class HyperConnection(nn.Module):
  """Around one sublayer. `index`: at first it reads stream `index` mod E, and mixes none."""

  def __init__(self, config, index):
    super().__init__()
    check_choice("norm", config.norm, NORMS)
    C, E, self.dynamic = config.hidden_size, config.rate, config.dynamic
    self.static_alpha = nn.Parameter(torch.cat([torch.eye(E)[:, [index % E]], torch.eye(E)], dim=1))
    self.static_beta = nn.Parameter(torch.ones(E))
    if self.dynamic:
      self.norm = NORMS[config.norm](C, *([config.dynamic_norm_eps] if config.dynamic_norm_eps else []))
      self.dynamic_alpha_proj = nn.Parameter(torch.zeros(C, E + 1))
      self.dynamic_beta_proj = nn.Parameter(torch.zeros(C))
      self.dynamic_alpha_scale = nn.Parameter(torch.full((1,), 0.01))
      self.dynamic_beta_scale = nn.Parameter(torch.full((1,), 0.01))

  def forward(self, streams):  # (B, T, E, C)
    """What the sublayer reads (B, T, C), the mixed streams, and beta."""
    alpha, beta = self.static_alpha, self.static_beta
    if self.dynamic:
      normed = self.norm(streams)
      alpha = alpha + self.dynamic_alpha_scale * (normed @ self.dynamic_alpha_proj).tanh()  # (B, T, E, E+1)
      beta = beta + self.dynamic_beta_scale * (normed @ self.dynamic_beta_proj).tanh()  # (B, T, E)
    mixed = alpha.transpose(-1, -2) @ streams  # (B, T, E+1, C)
    return mixed[:, :, 0], mixed[:, :, 1:], beta

  def write(self, mixed, beta, y):
    return mixed + beta[..., None] * y[:, :, None]


class HyperLayer(Layer):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    check_choice("prenorm", config.prenorm, ("layernorm_no_affine", "rmsnorm"))
    check_choice("layer_index", config.layer_index, ("layer", "sublayer"))
    if config.prenorm == "layernorm_no_affine":
      self.input_layernorm = NORMS[config.prenorm](config.hidden_size)
      self.post_attention_layernorm = NORMS[config.prenorm](config.hidden_size)
    by_layer = config.layer_index == "layer"
    self.attn_hc = HyperConnection(config, layer if by_layer else 2 * layer)
    self.mlp_hc = HyperConnection(config, layer if by_layer else 2 * layer + 1)

  def sublayers(self, streams, carried, shared, step):
    x, mixed, beta = self.attn_hc(streams)
    y, shared = self.self_attn(self.input_layernorm(x), shared, step)
    x, mixed, beta = self.mlp_hc(self.attn_hc.write(mixed, beta, y))
    inner = self.post_attention_layernorm(x)
    return self.mlp_hc.write(mixed, beta, self.mlp(inner)), carried, self.leave(inner, shared, step)

  def initialise(self):
    if self.config.output_init_scale:
      self.self_attn.o_proj.weight /= math.sqrt(self.config.rate)
      self.mlp.down_proj.weight /= math.sqrt(self.config.rate)


class HyperBackbone(Backbone):
  def forward(self, tokens, step):
    x = self.embed(tokens, step)
    streams = x[:, :, None].expand(-1, -1, self.config.rate, -1)
    return self.norm(self.run_layers(streams, (), self.begin(x, tokens), step)[0].sum(2))


class Hyper(Llama):
  config_class, backbone, layer = HyperConfig, HyperBackbone, HyperLayer
