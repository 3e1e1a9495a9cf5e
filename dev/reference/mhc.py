"""Manifold-constrained hyper-connections in PyTorch: E = hc_mult residual streams, each token's own mixtures of them.

Every sublayer f has, computed from all streams of the token, pre (E), post (E) and comb (E, E):

  x = sum over i of  pre[i] * stream[i]
  stream'[i] = post[i] * f(x) + sum over k of  comb[k, i] * stream[k]

comb's columns sum to 1 and its rows do so nearly (sinkhorn) or exactly (permutations), or it is the identity. With
reads previous a sublayer reads by the pre of the one before; the first one reads stream 0.
"""
import dataclasses
import itertools
import math

import torch
from torch import nn

from .config import Config, check_choice
from .llama import Backbone, Layer, Llama, unit_rms


@dataclasses.dataclass
class MhcConfig(Config):
  arch: str = "mhc"
  hc_mult: int = 4  # E
  mixing: str = "sinkhorn"  # sinkhorn | identity | permutations
  reads: str = "own"  # own | previous
  start: str = "even"  # even | one_hot: what a sublayer reads at first
  hc_sinkhorn_iters: int = 20
  hc_eps: float = 1e-6

  def streams(self):
    return self.hc_mult

  def one_stream(self):
    return False


def sinkhorn(logits, iterations, eps):
  """(..., E, E), k the row: a softmax of each row, then columns and rows in turn are divided by their sums."""
  comb = logits.softmax(-1) + eps
  comb = comb / (comb.sum(-2, keepdim=True) + eps)
  for _ in range(iterations - 1):
    comb = comb / (comb.sum(-1, keepdim=True) + eps)
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
  return comb


def permutations(E, like):
  """(E!, E, E): all permutation matrices P[k, p(k)] = 1, p in lexicographic order."""
  return torch.stack([torch.eye(E)[list(p)] for p in itertools.permutations(range(E))]).to(like)


class Logits(nn.Module):
  """rms-normed streams times fn, scaled by group, plus base. `groups`: how many rows have one scale each."""

  def __init__(self, config, groups, prefix=""):
    super().__init__()
    self.config, self.groups, self.prefix = config, groups, prefix
    E, C, M = config.hc_mult, config.hidden_size, sum(groups)
    for name, parameter in (("fn", torch.empty(M, E * C)), ("base", torch.zeros(M)),
                            ("scale", torch.full((len(groups),), 0.01))):
      self.register_parameter(prefix + name, nn.Parameter(parameter))

  def part(self, name):
    return getattr(self, self.prefix + name)  # whatever a sharding wrapper has put there

  def forward(self, streams):  # (B, T, E, C)
    z = unit_rms(streams.flatten(-2), self.config.rms_norm_eps) @ self.part("fn").T
    scale = self.part("scale").repeat_interleave(torch.tensor(self.groups, device=z.device))
    return (scale * z + self.part("base")).split(self.groups, -1)

  def initialise(self):
    nn.init.normal_(self.part("fn"), std=self.config.initializer_range)


class MhcConnection(Logits):
  """Around one sublayer."""

  def __init__(self, config, sublayer):
    check_choice("start", config.start, ("even", "one_hot"))
    check_choice("mixing", config.mixing, ("sinkhorn", "identity", "permutations"))
    check_choice("reads", config.reads, ("own", "previous"))
    E = config.hc_mult
    mixed = {"sinkhorn": [E * E], "identity": [], "permutations": [math.factorial(E)]}[config.mixing]
    super().__init__(config, [E, E, *mixed])
    self.sublayer = sublayer

  def comb(self, logits):
    E = self.config.hc_mult
    if self.config.mixing == "sinkhorn":
      return sinkhorn(logits[0].unflatten(-1, (E, E)), self.config.hc_sinkhorn_iters, self.config.hc_eps)
    if self.config.mixing == "permutations":
      return torch.einsum("...p,pki->...ki", logits[0].softmax(-1), permutations(E, logits[0]))
    return torch.eye(E).to(self.base)

  def forward(self, streams, given):
    """What the sublayer reads (B, T, C), the mixed streams, this sublayer's post and pre. given: the pre of the
    sublayer before."""
    l_pre, l_post, *l_comb = super().forward(streams)
    pre, post = l_pre.sigmoid() + self.config.hc_eps, 2 * l_post.sigmoid()
    x = read_streams(streams, pre if self.config.reads == "own" else given)
    return x, self.comb(l_comb).transpose(-1, -2) @ streams, post, pre

  def write(self, mixed, post, y):
    return mixed + post[..., None] * y[..., None, :]

  def initialise(self):
    super().initialise()
    E = self.config.hc_mult
    self.base.zero_()
    if self.config.start == "one_hot":
      self.base[:E] = -1
      self.base[self.sublayer % E] = 1
    elif E > 1:
      self.base[:E] = -math.log(E - 1)
    if self.config.mixing == "permutations":
      self.base[2 * E + 1 :] = -8
    elif self.config.mixing == "sinkhorn":
      self.base[2 * E :] = -8 * (1 - torch.eye(E)).flatten()


def read_streams(streams, pre):
  return (pre[..., None] * streams).sum(-2)


class MhcLayer(Layer):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    self.attn_hc, self.ffn_hc = MhcConnection(config, 2 * layer), MhcConnection(config, 2 * layer + 1)

  def sublayers(self, streams, pre, shared, step):
    x, mixed, post, pre = self.attn_hc(streams, pre)
    y, shared = self.self_attn(self.input_layernorm(x), shared, step)
    x, mixed, post, pre = self.ffn_hc(self.attn_hc.write(mixed, post, y), pre)
    inner = self.post_attention_layernorm(x)
    return self.ffn_hc.write(mixed, post, self.mlp(inner)), pre, self.leave(inner, shared, step)


class MhcBackbone(Backbone):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    if config.reads == "own":
      self.hc_head = Logits(config, [config.hc_mult], "hc_")

  def forward(self, tokens, step):
    E = self.config.hc_mult
    x = self.embed(tokens, step)
    streams = x[:, :, None].expand(-1, -1, E, -1)
    pre = torch.eye(E)[0].to(streams)
    streams, pre = self.run_layers(streams, pre, self.begin(x, tokens), step)
    if self.config.reads == "own":
      pre = self.hc_head(streams)[0].sigmoid() + self.config.hc_eps
    return self.norm(read_streams(streams, pre.to(streams.device)))


class Mhc(Llama):
  config_class, backbone, layer = MhcConfig, MhcBackbone, MhcLayer
