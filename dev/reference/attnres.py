"""Attention residuals in PyTorch: in place of the residual stream, every sublayer attends over depth.

It reads a mixture of sources x_s, token by token, and so does the final norm:

  h = sum over s of  a_s * x_s        a = softmax over s of  w . (g * unit_rms(x_s))

w and g belong to the reader. The sources are the embeddings and the outputs of all sublayers so far, where
attn_res_block_size is 0; else sums of the outputs of so many layers, the last of them as far as it has come. The
embeddings stay a source of their own.
"""
import dataclasses

import torch
from torch import nn

from .config import Config
from .llama import Backbone, Layer, Llama, RMSNorm


@dataclasses.dataclass
class AttnresConfig(Config):
  arch: str = "attnres"
  attn_res_block_size: int = 4  # in layers; 0: every sublayer's output is a source

  def one_stream(self):
    return False


class Query(nn.Linear):
  """w, (1, C): a logit for every vector."""

  def __init__(self, config):
    super().__init__(config.hidden_size, 1, bias=False)

  def initialise(self):
    nn.init.zeros_(self.weight)


def gain(config):
  return RMSNorm(config.hidden_size, config.rms_norm_eps)


def mixture(sources, proj, norm):
  x = torch.stack(sources)  # (S, B, T, C)
  return (proj(norm(x)).to(x.device).softmax(0) * x).sum(0)


def add_source(finished, newest, y, closed):
  """The sources after a sublayer's output y: a new one where the newest is closed, else a part of the newest."""
  return ((*finished, newest), y) if closed else (finished, newest + y)


class AttnresLayer(Layer):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    self.self_attention_res_proj, self.self_attention_res_norm = Query(config), gain(config)
    self.mlp_res_proj, self.mlp_res_norm = Query(config), gain(config)

  def sublayers(self, newest, finished, shared, step):
    size = self.config.attn_res_block_size
    x = mixture((*finished, newest), self.self_attention_res_proj, self.self_attention_res_norm)
    y, shared = self.self_attn(self.input_layernorm(x), shared, step)
    finished, newest = add_source(finished, newest, y, size == 0 or self.layer % size == 0)
    inner = self.post_attention_layernorm(mixture((*finished, newest), self.mlp_res_proj, self.mlp_res_norm))
    finished, newest = add_source(finished, newest, self.mlp(inner), size == 0)
    return newest, finished, self.leave(inner, shared, step)


class AttnresBackbone(Backbone):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    self.output_attn_res_proj, self.output_attn_res_norm = Query(config), gain(config)

  def forward(self, tokens, step):
    newest, finished = self.embed(tokens, step), ()
    shared = self.begin(newest, tokens)
    for layer in self.layers:
      newest, finished, shared = layer(newest, finished, shared, step)
    return self.norm(mixture((*finished, newest), self.output_attn_res_proj, self.output_attn_res_norm))


class Attnres(Llama):
  config_class, backbone, layer = AttnresConfig, AttnresBackbone, AttnresLayer
