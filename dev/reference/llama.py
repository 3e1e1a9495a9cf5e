"""LLaMA in PyTorch, for reading and for checking: no kernels, no caches, one class per part of the model.

Letters: B batch, T time, C width, V vocabulary, L layers, H query heads, K key/value heads, D head width, F
feed-forward width. The state dict carries the names of a LLaMA checkpoint (model.layers.3.self_attn.q_proj.weight);
q_norm and k_norm appear where qk_norm is on, lm_head.weight where the embedding is not tied to it. An architecture that
connects layers across depth replaces Attention.route.
"""
import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn


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
  tie_word_embeddings: bool = False
  qk_norm: bool = False
  qk_norm_eps: float = 1e-5
  arch: str = "llama"
  routing: str = "full"  # lime: full | average | last | first
  window: int = 0  # lime: the j of last-j and first-j


class RMSNorm(nn.Module):
  """y = weight * x / sqrt(mean(x^2) + eps), over the last dimension."""

  def __init__(self, width, eps):
    super().__init__()
    self.weight = nn.Parameter(torch.ones(width))
    self.eps = eps

  def forward(self, x):
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def rotate(x, theta):
  """Rotary positions, half-split: channel j turns together with channel j + D/2. x: (B, heads, T, D)."""
  T, D = x.shape[-2:]
  frequency = theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)  # (D/2)
  angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency  # (T, D/2)
  cos, sin = angle.cos().to(x), angle.sin().to(x)
  a, b = x[..., : D // 2], x[..., D // 2 :]
  return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
  """Causal attention with grouped queries: query head h reads key/value head h // (H / K)."""

  def __init__(self, config, layer):
    super().__init__()
    self.config, self.layer = config, layer
    C, H, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    self.q_proj = nn.Linear(C, H * D, bias=False)
    self.k_proj = nn.Linear(C, K * D, bias=False)
    self.v_proj = nn.Linear(C, K * D, bias=False)
    self.o_proj = nn.Linear(H * D, C, bias=False)
    if config.qk_norm:
      self.q_norm = RMSNorm(D, config.qk_norm_eps)
      self.k_norm = RMSNorm(D, config.qk_norm_eps)

  def route(self, keys, values, slab):
    """The keys and values (B, K, T, D) to attend to. `slab` is a list shared by all layers of one forward pass."""
    return keys, values

  def forward(self, x, slab):  # x: (B, T, C)
    B, T, _ = x.shape
    H, K, D = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
    q = self.q_proj(x).view(B, T, H, D).transpose(1, 2)  # (B, H, T, D)
    k = self.k_proj(x).view(B, T, K, D).transpose(1, 2)  # (B, K, T, D)
    v = self.v_proj(x).view(B, T, K, D).transpose(1, 2)
    if self.config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    q, k = rotate(q, self.config.rope_theta), rotate(k, self.config.rope_theta)
    k, v = self.route(k, v, slab)
    k, v = k.repeat_interleave(H // K, dim=1), v.repeat_interleave(H // K, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)  # (B, H, T, T)
    future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
    out = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return self.o_proj(out.transpose(1, 2).reshape(B, T, H * D))


class MLP(nn.Module):
  """SwiGLU."""

  def __init__(self, config):
    super().__init__()
    self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
    self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
    self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

  def forward(self, x):
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
  def __init__(self, config, layer, attention):
    super().__init__()
    self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
    self.self_attn = attention(config, layer)
    self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
    self.mlp = MLP(config)

  def forward(self, x, slab):
    x = x + self.self_attn(self.input_layernorm(x), slab)
    return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
  def __init__(self, config, attention):
    super().__init__()
    self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    self.layers = nn.ModuleList(Layer(config, i, attention) for i in range(config.num_hidden_layers))
    self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

  def forward(self, tokens):
    x, slab = self.embed_tokens(tokens), []
    for layer in self.layers:
      x = layer(x, slab)
    return self.norm(x)


class Llama(nn.Module):
  """logits = model(tokens); loss = model.loss(tokens, targets). tokens, targets: (B, T); logits: (B, T, V)."""

  attention = Attention

  def __init__(self, config):
    super().__init__()
    self.config = config
    self.model = Backbone(config, self.attention)
    if not config.tie_word_embeddings:
      self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    for module in self.modules():
      if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)

  def forward(self, tokens):
    head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
    return F.linear(self.model(tokens), head.weight)

  def loss(self, tokens, targets):
    """Mean cross-entropy over the targets that are not -1."""
    return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)
