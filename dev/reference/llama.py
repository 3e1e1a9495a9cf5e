"""LLaMA in PyTorch, for reading and for checking: no kernels, no caches, one class per part of the model. With backbone
gpt2 in its configuration it is a GPT-2 (gpt2.py).

Letters: B batch, T time, C width, V vocabulary, L layers, H query heads, K key/value heads, D head width, F
feed-forward width. The state dict carries the names of a LLaMA checkpoint (model.layers.3.self_attn.q_proj.weight);
q_norm and k_norm appear where qk_norm is on, lm_head.weight where the embedding is not tied to it.

An architecture that connects layers across depth replaces what it changes: how an attention projects its input
(project), which keys and values it attends to (route), the two sublayers (Layer), what flows from layer to layer
(Backbone). `shared` is a list, empty at first, in which layers leave to later ones what those need. A module whose
parameters start with other values sets them in a method initialise.
"""
import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn

from . import gpt2


@dataclasses.dataclass
class Config:
  vocab_size: int  # V
  hidden_size: int  # C
  intermediate_size: int  # F
  num_hidden_layers: int  # L
  num_attention_heads: int  # H
  num_key_value_heads: int  # K
  head_dim: int  # D, which need not be C / H
  rms_norm_eps: float = 1e-6
  rope_theta: float = 10000.0
  rope_scaling: dict | None = None  # Llama 3.1's: factor, low_freq_factor, high_freq_factor, the original length
  tie_word_embeddings: bool = False
  qk_norm: bool = False
  qk_norm_eps: float = 1e-5
  arch: str = "llama"
  backbone: str = "llama"  # or gpt2, for which rope and qk_norm mean nothing, and the following are
  max_position_embeddings: int = 2048  # learned positions
  bias: bool = True
  activation_function: str = "gelu_new"
  scale_attn_by_inverse_layer_idx: bool = False  # the logits of layer i (from 0) are divided by i + 1, too


def check_choice(name, value, choices):
  """Raises ValueError for a value of a Config field that is none of the choices."""
  if value not in choices:
    raise ValueError(f"{name} is {value!r}, not one of {', '.join(choices)}")


def unit_rms(x, eps):
  """x / sqrt(mean(x^2) + eps), over the last dimension."""
  return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
  """y = weight * unit_rms(x)."""

  def __init__(self, width, eps):
    super().__init__()
    self.weight = nn.Parameter(torch.ones(width))
    self.eps = eps

  def forward(self, x):
    return self.weight * unit_rms(x, self.eps)


def backbone_norm(config, bias=True):
  """In front of a sublayer. bias: a GPT-2's has one, if the model has biases."""
  if config.backbone == "gpt2":
    return gpt2.LayerNorm(config.hidden_size, config.rms_norm_eps, bias and config.bias)
  return RMSNorm(config.hidden_size, config.rms_norm_eps)


def backbone_mlp(config, inner):
  if config.backbone == "gpt2":
    return gpt2.MLP(config.hidden_size, inner, config.activation_function, config.bias)
  return MLP(config.hidden_size, inner)


def frequencies(D, theta, scaling):
  """Radians a position for each pair of channels: (D/2). Scaling slows down those that turn seldom."""
  frequency = theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
  if scaling is None:
    return frequency
  low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
  turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
  kept = ((turns - low) / (high - low)).clamp(0, 1)
  return frequency * (kept + (1 - kept) / scaling["factor"])


def rotate(x, theta, scaling=None):
  """Rotary positions, half-split: channel j turns together with channel j + D/2. x: (B, heads, T, D)."""
  T, D = x.shape[-2:]
  frequency = frequencies(D, theta, scaling)  # (D/2)
  angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency  # (T, D/2)
  cos, sin = angle.cos().to(x), angle.sin().to(x)
  a, b = x[..., : D // 2], x[..., D // 2 :]
  return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def split_heads(x, D):
  """(B, T, heads*D) as (B, heads, T, D)."""
  return x.unflatten(-1, (-1, D)).transpose(1, 2)


class Attention(nn.Module):
  """Causal attention with grouped queries: query head h reads key/value head h // (H / K)."""

  def __init__(self, config, layer):
    super().__init__()
    self.config, self.layer = config, layer
    C, H, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    bias = config.backbone == "gpt2" and config.bias
    self.q_proj = nn.Linear(C, H * D, bias=bias)
    self.k_proj = nn.Linear(C, K * D, bias=bias)
    self.v_proj = nn.Linear(C, K * D, bias=bias)
    self.o_proj = nn.Linear(H * D, C, bias=bias)
    if config.qk_norm:
      self.q_norm = RMSNorm(D, config.qk_norm_eps)
      self.k_norm = RMSNorm(D, config.qk_norm_eps)

  def project(self, x, shared):
    """Queries (B, H, T, D), keys and values (B, K, T, D), neither normed nor rotated yet."""
    return tuple(split_heads(proj(x), self.config.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))

  def route(self, keys, values, shared):
    """The keys and values (B, K or H, T, D) to attend to, from the layer's own, whose keys are normed and rotated."""
    return keys, values

  def forward(self, x, shared):  # x: (B, T, C)
    q, k, v = self.project(x, shared)
    if self.config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    if self.config.backbone == "llama":
      q, k = (rotate(x, self.config.rope_theta, self.config.rope_scaling) for x in (q, k))
    k, v = self.route(k, v, shared)
    (H, T, D), heads = q.shape[1:], k.shape[1]
    k, v = k.repeat_interleave(H // heads, dim=1), v.repeat_interleave(H // heads, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)  # (B, H, T, T)
    if self.config.scale_attn_by_inverse_layer_idx:
      scores = scores / (self.layer + 1)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    out = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
  """SwiGLU."""

  def __init__(self, width, inner):
    super().__init__()
    self.gate_proj = nn.Linear(width, inner, bias=False)
    self.up_proj = nn.Linear(width, inner, bias=False)
    self.down_proj = nn.Linear(inner, width, bias=False)

  def forward(self, x):
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
  def __init__(self, config, layer, attention):
    super().__init__()
    self.config, self.layer = config, layer
    self.input_layernorm = backbone_norm(config)
    self.self_attn = attention(config, layer)
    self.post_attention_layernorm = backbone_norm(config)
    self.mlp = backbone_mlp(config, config.intermediate_size)

  def forward(self, x, shared):
    x = x + self.self_attn(self.input_layernorm(x), shared)
    return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
  def __init__(self, config, layer, attention):
    super().__init__()
    self.config = config
    self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    if config.backbone == "gpt2":
      self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
    self.layers = nn.ModuleList(layer(config, i, attention) for i in range(config.num_hidden_layers))
    self.norm = backbone_norm(config)

  def embed(self, tokens):
    x = self.embed_tokens(tokens)
    return x + self.embed_positions.weight[: tokens.shape[1]] if self.config.backbone == "gpt2" else x

  def forward(self, tokens):
    x, shared = self.embed(tokens), []
    for layer in self.layers:
      x = layer(x, shared)
    return self.norm(x)


class Llama(nn.Module):
  """logits = model(tokens); loss = model.loss(tokens, targets). tokens, targets: (B, T); logits: (B, T, V)."""

  config_class, backbone, layer, attention = Config, Backbone, Layer, Attention

  def __init__(self, config):
    super().__init__()
    self.config = config
    self.model = self.backbone(config, self.layer, self.attention)
    if not config.tie_word_embeddings:
      self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    for module in self.modules():
      if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
      if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    with torch.no_grad():
      for name, parameter in self.named_parameters() if config.backbone == "gpt2" else ():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
          parameter /= math.sqrt(2 * config.num_hidden_layers)
      for module in self.modules():
        if hasattr(module, "initialise"):
          module.initialise()

  def forward(self, tokens):
    head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
    return F.linear(self.model(tokens), head.weight)

  def loss(self, tokens, targets):
    """Mean cross-entropy over the targets that are not -1."""
    return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)


@dataclasses.dataclass
class Gpt2Config(Config):
  arch: str = "gpt2"
  backbone: str = "gpt2"


class Gpt2(Llama):
  config_class = Gpt2Config
