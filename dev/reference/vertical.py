"""Vertical attention in PyTorch: every layer reads a weighted mean of all earlier representations.

h_0 is the embeddings, h_m the output of layer m-1. Layer i reads

  v = sum over m <= i of  w_m * h_m        w = softmax over m of  scores[m] - ln |h_m|

Dividing by the length |h_m|, token by token, lets a short source count as much as a long one. The fixed maps have no
scores: their sources count the same. "inet": layers read h_0, h_1 and their own h_i. "unet": layers of the second
half read their own h_i and what the mirrored layer of the first half read, h_(L-1-i), or with mirror_offset 2 put
out. residual=False takes the published equations to the letter: a sublayer's output replaces its input.
"""
import dataclasses

import torch
from torch import nn

from .config import Config, check_choice
from .llama import Layer, Llama

LENGTH_EPS = 1e-12  # added to |h|^2


@dataclasses.dataclass
class VerticalConfig(Config):
  arch: str = "vertical"
  map: str = "learned"  # learned | unet | inet
  residual: bool = True
  init_diag: float = 0.0  # how the score of h_i starts
  mirror_offset: int = 1  # unet: 1 reads what the mirrored layer read, 2 what it put out

  def one_stream(self):
    return False


def readable_layers(config, layer):
  """The m whose h_m the layer may read, ascending."""
  if config.map == "inet":
    return sorted({0, min(1, layer), layer})
  if config.map == "unet":
    mirrored = config.num_hidden_layers - 2 - layer + config.mirror_offset
    return [layer] if 2 * layer < config.num_hidden_layers else sorted({mirrored, layer})
  return list(range(layer + 1))


class VerticalAttention(nn.Module):
  def __init__(self, config, layer):
    super().__init__()
    check_choice("map", config.map, ("learned", "unet", "inet"))
    self.sources = readable_layers(config, layer)
    if config.map == "learned":
      self.scores = nn.Parameter(torch.tensor([0.0] * layer + [config.init_diag]))

  def forward(self, history):  # [h_0, ..., h_i], each (B, T, C)
    h = torch.stack([history[m] for m in self.sources])
    logits = -0.5 * (h.square().sum(-1) + LENGTH_EPS).log()  # (sources, B, T)
    if hasattr(self, "scores"):
      logits = logits + self.scores[:, None, None]
    return (logits.softmax(0)[..., None] * h).sum(0)


class VerticalLayer(Layer):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    self.vertical_attention = VerticalAttention(config, layer)

  def sublayers(self, x, history, shared, step):
    history = (*history, x)  # h_0, ..., h_i
    x = self.vertical_attention(history)
    if self.config.residual:
      return super().sublayers(x, history, shared, step)
    x, shared = self.self_attn(self.input_layernorm(x), shared, step)
    inner = self.post_attention_layernorm(x)
    return self.mlp(inner), history, self.leave(inner, shared, step)


class Vertical(Llama):
  config_class, layer = VerticalConfig, VerticalLayer
