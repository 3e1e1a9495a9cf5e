"""Engram in PyTorch: before some layers each stream takes in what tables say of the n-grams that end at its token.

  rows of a token   for n = 2 .. order and every head: an integer hash of the last n tokens, which counts from the first
                    token of the sequence, of the document, or after a boundary; before that there are pads
  e (M)             what the tables have there, one behind the other
  k_1 .. k_E, val   wkv e: a key for each stream, one value
  stream_s         += sigmoid(signed root of <norm(stream_s) q_weight_s, norm(k_s) k_weight_s> / sqrt(C)) val
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

# Where Config holds what is said of it.
ENGRAM_KEYS = ("engram_layers", "engram_order", "engram_heads", "engram_width", "engram_rows", "engram_boundary",
               "engram_pad_id", "engram_seed", "engram_map", "engram_multipliers")
LEAST_LOGIT = 1e-6  # below its root


def is_prime(n):
  return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def primes_from(least, first, count):
  """Numbers first .. first + count - 1 of the primes from `least` on."""
  primes = []
  while len(primes) < first + count:
    if is_prime(least):
      primes.append(least)
    least += 1
  return primes[first:]


def mixed(z):
  """splitmix64's."""
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
    z = (z ^ z >> shift) * factor % 2**64
  return z ^ z >> 31


def drawn_multipliers(seed, which, order, words):
  """Odd, and small enough that a product with a word stays below 2^63."""
  half = max(1, (2**63 - 1) // words // 2)
  return [2 * (mixed((seed + 10007 * which + 0x9E3779B97F4A7C15 * (i + 2)) % 2**64) % half) + 1 for i in range(order)]


class Hash:
  """The rows that tokens look up in the which-th Engram of a model, from 0."""

  def __init__(self, config, which):
    self.words = None if config.engram_map == "none" else config.engram_map
    size = config.vocab_size if self.words is None else 1 + max(self.words)
    self.boundary, self.pad = config.engram_boundary, config.engram_pad_id
    given = config.engram_multipliers
    self.multipliers = (given[which] if given else
                        drawn_multipliers(config.engram_seed, which, config.engram_order, size))
    Z = (config.engram_order - 1) * config.engram_heads
    self.primes, self.heads = primes_from(config.engram_rows, which * Z, Z), config.engram_heads

  def __call__(self, tokens, T, documents):
    """(B, T, Z), of the last T of tokens (B, S), among which -1 is padding. documents (B or 1, S): their numbers; None:
    each row is one."""
    word = tokens.clamp(min=0)
    ends = (tokens < 0) | torch.isin(word, torch.tensor(self.boundary, device=tokens.device, dtype=tokens.dtype))
    pad = torch.full_like(tokens[:, :1], self.pad)
    if self.words is not None:
      words = torch.tensor(self.words, device=tokens.device, dtype=tokens.dtype)
      word, pad = words[word], words[pad]
    stopped, mix, rows = torch.zeros_like(ends), word * self.multipliers[0], []
    for back, multiplier in enumerate(self.multipliers[1:], 1):
      before = torch.cat([pad.expand(-1, min(back, word.shape[1])), word[:, :-back]], dim=1)
      stopped = stopped | torch.cat([torch.ones_like(ends[:, :back]), ends[:, :-back]], dim=1)
      if documents is not None:
        other = (documents[:, back:] != documents[:, :-back]).to(ends.device)
        stopped = stopped | F.pad(other, (min(back, documents.shape[1]), 0))
      mix = mix ^ torch.where(stopped, pad, before) * multiplier
      for head in range(self.heads):
        column = len(rows)
        rows.append(mix % self.primes[column] + sum(self.primes[:column]))
    return torch.stack(rows, dim=-1)[:, -T:]


class Engram(nn.Module):
  def __init__(self, config, layer):
    super().__init__()
    self.hash = Hash(config, list(config.engram_layers).index(layer))
    C, E, M = config.hidden_size, config.streams(), config.engram_width or config.hidden_size
    self.embed = nn.Embedding(sum(self.hash.primes), M // len(self.hash.primes))
    self.wkv = nn.Linear(M, (E + 1) * C, bias=False)
    self.q_weight, self.k_weight = nn.Parameter(torch.ones(E, C)), nn.Parameter(torch.ones(E, C))
    self.eps = config.rms_norm_eps

  def initialise(self):
    nn.init.normal_(self.embed.weight, std=0.02)

  def forward(self, x, tokens, documents=None):
    """x: (B, T, C), or (B, T, E, C) of several streams; tokens: (B, S), of which the last T are these; documents: of
    tokens (B or 1, S)."""
    streams = x[:, :, None] if x.ndim == 3 else x
    device = self.embed.weight.device
    device = x.device if device.type == "meta" else device  # then a hook of accelerate's fetches the table from disk
    looked_up = self.embed(self.hash(tokens.to(device), x.shape[1], documents)).flatten(2)
    keys = self.wkv(looked_up).unflatten(-1, (-1, x.shape[-1])).to(x.device)
    keys, value = keys[:, :, :-1], keys[:, :, -1:]
    wide = torch.promote_types(x.dtype, torch.float32)
    def normed(y, gain):
      y = y.to(wide)
      return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * gain.to(y)
    q = (normed(streams, self.q_weight) * normed(keys, self.k_weight)).sum(-1, keepdim=True) / math.sqrt(x.shape[-1])
    gate = torch.copysign(q.abs().clamp(min=LEAST_LOGIT).sqrt(), q).sigmoid().to(x)
    return (streams + gate * value).view_as(x)
