"""Gated residual streams in PyTorch: E = hc_count residual streams, read channel by channel through a small network.

Every sublayer f has, computed from all streams of the token, gates (E, C) and factors (E):

  x = mean over i of  gates[i] * norm(stream[i])
  stream'[i] = stream[i] + factors[i] * f(x)

There are no other norms in front of a sublayer or of the head, which reads one more such mean.
"""
import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from .config import Config
from .llama import Backbone, Layer, Llama, unit_rms


@dataclasses.dataclass
class GatedStreamsConfig(Config):
  arch: str = "gated_streams"
  hc_count: int = 4  # E
  hc_lowrank: int = 0  # R; 0: C / 32

  def streams(self):
    return self.hc_count

  def one_stream(self):
    return False


class StreamsNorm(nn.Module):
  """Each stream for itself, with a gain that starts at 0 for 1."""

  def __init__(self, E, C, eps):
    super().__init__()
    self.weight = nn.Parameter(torch.zeros(E * C))
    self.eps = eps

  def forward(self, streams):  # (B, T, E, C)
    return unit_rms(streams, self.eps) * (1 + self.weight.view(streams.shape[-2:]))


class GatedRead(nn.Module):
  def __init__(self, config, writes=True):
    super().__init__()
    E, C = config.hc_count, config.hidden_size
    R = config.hc_lowrank or max(1, C // 32)
    self.hc_norm = StreamsNorm(E, C, config.rms_norm_eps)
    self.input_mix_weight_down = nn.Linear(E * C, R, bias=False)
    self.input_mix_weight_up = nn.Linear(R, E * C, bias=False)
    if writes:
      self.block_inject_weight = nn.Linear(E * C, E, bias=False)

  def forward(self, streams):
    """What is read (B, T, C), and the normed streams."""
    normed = self.hc_norm(streams)
    hidden = F.silu(self.input_mix_weight_down(normed.flatten(-2)) / streams.shape[-2])
    gates = self.input_mix_weight_up(hidden).sigmoid().view_as(streams)
    return (gates * normed).mean(-2), normed

  def write(self, streams, normed, y):
    factors = 2 * (self.block_inject_weight(normed.flatten(-2)) / streams.shape[-2]).sigmoid()
    return streams + factors[..., None] * y[..., None, :]


class GatedStreamsLayer(Layer):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    del self.input_layernorm, self.post_attention_layernorm
    self.attn_hyper_connection, self.mlp_hyper_connection = GatedRead(config), GatedRead(config)

  def sublayers(self, streams, carried, shared, step):
    x, normed = self.attn_hyper_connection(streams)
    y, shared = self.self_attn(x, shared, step)
    streams = self.attn_hyper_connection.write(streams, normed, y)
    inner, normed = self.mlp_hyper_connection(streams)
    streams = self.mlp_hyper_connection.write(streams, normed, self.mlp(inner))
    return streams, carried, self.leave(inner, shared, step)


class GatedStreamsBackbone(Backbone):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    del self.norm
    self.hyper_connection_mixer = GatedRead(config, writes=False)

  def forward(self, tokens, step):
    x = self.embed(tokens, step)
    streams = x[:, :, None].expand(-1, -1, self.config.hc_count, -1)
    return self.hyper_connection_mixer(self.run_layers(streams, (), self.begin(x, tokens), step)[0])[0]


class GatedStreams(Llama):
  config_class, backbone, layer = GatedStreamsConfig, GatedStreamsBackbone, GatedStreamsLayer
