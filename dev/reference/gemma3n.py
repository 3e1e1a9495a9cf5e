"""Gemma's small connections in PyTorch, on the backbone's block: embeddings of each token for every layer (PLE), and a
low-rank branch beside attention (LAuReL).

With e the scaled embedding of a token, layer v adds, behind its feed-forward part, a product with its own input p_v:

  p_v = (rms((Wm e)_v / sqrt(C)) + sqrt(W) table[token]_v) / sqrt(2)
  x   = x + rms(Wo (gelu(Wg x) * p_v))

and attention, which reads xh, leaves (x + y + xh + rms(Wb Wa xh)) / sqrt(2), or x + y + Wb Wa xh as in the paper.
"""
import dataclasses
import math

import torch.nn.functional as F
from torch import nn

from .config import Config, check_choice
from .llama import Backbone, Layer, Llama, RMSNorm


@dataclasses.dataclass
class Gemma3nConfig(Config):
  arch: str = "gemma3n"
  hidden_size_per_layer_input: int = 256  # W; 0: no embeddings of layers
  laurel_rank: int = 64  # R; 0: no branch
  laurel_form: str = "gemma"  # gemma | paper
  embed_scale: str = "sqrt"  # sqrt | none


class ZeroNorm(RMSNorm):
  """Its gain starts at 0."""

  def initialise(self):
    nn.init.zeros_(self.weight)


class Laurel(nn.Module):
  def __init__(self, config):
    super().__init__()
    check_choice("laurel_form", config.laurel_form, ("gemma", "paper"))
    C, R, self.gemma = config.hidden_size, config.laurel_rank, config.laurel_form == "gemma"
    self.linear_left, self.linear_right = nn.Linear(C, R, bias=False), nn.Linear(R, C, bias=False)
    if self.gemma:
      self.post_laurel_norm = ZeroNorm(C, config.rms_norm_eps)

  def initialise(self):
    if not self.gemma:
      nn.init.zeros_(self.linear_right.weight)

  def forward(self, x, y, normed):
    """The stream, from itself, attention's output, and what attention has read."""
    branch = self.linear_right(self.linear_left(normed))
    return (x + y + normed + self.post_laurel_norm(branch)) / math.sqrt(2) if self.gemma else x + y + branch


class Gemma3nLayer(Layer):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    C, W = config.hidden_size, config.hidden_size_per_layer_input
    if config.laurel_rank > 0:
      self.laurel = Laurel(config)
    if W > 0:
      self.per_layer_input_gate, self.per_layer_projection = nn.Linear(C, W, bias=False), nn.Linear(W, C, bias=False)
      self.post_per_layer_input_norm = ZeroNorm(C, config.rms_norm_eps)

  def sublayers(self, x, inputs, shared, step):  # inputs: one (B, T, L, W), or none
    normed = self.input_layernorm(x)
    y, shared = self.self_attn(normed, shared, step)
    x = self.laurel(x, y, normed) if hasattr(self, "laurel") else x + y
    inner = self.post_attention_layernorm(x)
    x, shared = x + self.mlp(inner), self.leave(inner, shared, step)
    if len(inputs) == 0:
      return x, inputs, shared
    own = inputs[0][:, :, self.layer].to(x.device)
    gated = F.gelu(self.per_layer_input_gate(x), approximate="tanh") * own
    return x + self.post_per_layer_input_norm(self.per_layer_projection(gated)), inputs, shared


class Gemma3nBackbone(Backbone):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    check_choice("embed_scale", config.embed_scale, ("sqrt", "none"))
    L, C, W = config.num_hidden_layers, config.hidden_size, config.hidden_size_per_layer_input
    if W > 0:
      self.embed_tokens_per_layer = nn.Embedding(config.vocab_size, L * W)
      self.per_layer_model_projection = nn.Linear(C, L * W, bias=False)
      self.per_layer_projection_norm = RMSNorm(W, config.rms_norm_eps)

  def forward(self, tokens, step):
    config, x, inputs = self.config, self.embed(tokens, step), ()
    shared = self.begin(x, tokens)
    C, W = config.hidden_size, config.hidden_size_per_layer_input
    if config.embed_scale == "sqrt":
      x = math.sqrt(C) * x
    if W > 0:
      context = self.per_layer_model_projection(x).unflatten(-1, (-1, W)) / math.sqrt(C)
      rows = self.embed_tokens_per_layer(tokens).unflatten(-1, (-1, W))
      inputs = ((self.per_layer_projection_norm(context) + math.sqrt(W) * rows) / math.sqrt(2),)
    return self.norm(self.run_layers(x, inputs, shared, step)[0])


class Gemma3n(Llama):
  config_class, backbone, layer = Gemma3nConfig, Gemma3nBackbone, Gemma3nLayer
