"""Embedding shortcuts in PyTorch: the embedding again before every layer, values from tables, a part of the middle off.

Before layer i the stream becomes resid[i] * x + x0[i] * embedding. A layer with a table adds to its values the row of
its token, times a gate for each head that the first channels of its input decide about. The final norm reads
x - backout * (x after layer L // 2).

All else is off unless it is asked for. unet: before layer i of the last half the stream takes in what layer L - 1 - i
has put out. value_from x0: a product of the embedding in place of a table's row. attn_saved: behind that layer,
attention reads what the layer has put out. lanes_from: from that layer on attention reads one lane and the MLP another,
and each puts out into both; the output is their mean. mudd_tail: the last layer's stream, perhaps its values, and the
output take in the embedding, the middle and the last layer's stream, by numbers that a network computes for each token.
"""
import dataclasses
import typing

import torch
import torch.nn.functional as F
from torch import nn

from .config import Config, check_choice
from .llama import Attention, Backbone, Layer, Llama, split_heads, unit_rms


@dataclasses.dataclass
class ShortcutsConfig(Config):
  arch: str = "shortcuts"
  value_embeds: str = "alternate"  # alternate | none | list
  value_layers: list = dataclasses.field(default_factory=list)
  gate_channels: int = 0  # 0: 12, or the width where that is smaller
  gate_scale: float = 3.0
  resid: bool = True
  x0: bool = True
  backout: bool = True
  embed_norm: bool = False
  unet: bool = False
  value_from: str = "tables"  # tables | x0
  lanes_from: int = 0
  attn_saved: int = 0
  mudd_tail: str = "none"  # none | residual | both
  mudd_width: int = 64

  def one_stream(self):
    return self.lanes_from == 0


def adds_values(config, layer):
  check_choice("value_embeds", config.value_embeds, ("alternate", "none", "list"))
  if config.value_embeds == "alternate":
    return layer % 2 == (config.num_hidden_layers - 1) % 2
  return config.value_embeds == "list" and layer in config.value_layers


class Reads(typing.NamedTuple):
  """What a layer takes beside the stream; None: not that."""
  own: torch.Tensor | None = None  # factor of the stream
  first: torch.Tensor | None = None  # of its start
  start: torch.Tensor | None = None
  skip: torch.Tensor | None = None  # factor of what the mirrored layer put out
  mirrored: torch.Tensor | None = None
  saved: torch.Tensor | None = None  # what attention reads instead of the stream
  kept: torch.Tensor | None = None  # (2), of attention and MLP: factor of both lanes
  post: torch.Tensor | None = None  # (2, 2): factor of what each puts out, for each lane
  tail: tuple | None = None  # the first network's weights, and the middle


def tail_weights(x, w1, w2, bias):
  """(B, T, 3 or 6)"""
  return 0.1 * F.linear(F.gelu(F.linear(x, w1)), w2, bias)


def weighted(weights, *sources):
  return sum(weight[..., None] * source for weight, source in zip(weights.unbind(-1), sources))


class ShortcutsAttention(Attention):
  """shared: for each layer the rows of its table by token, or None; with value_from x0 the embedding alone. x may be a
  pair, with what is added to the values."""

  def __init__(self, config, layer):
    super().__init__(config, layer)
    C, K = config.hidden_size, config.num_key_value_heads
    if adds_values(config, layer):
      self.ve_gate = nn.Linear(config.gate_channels or min(12, C), K, bias=False)
      if config.value_from == "x0":
        self.ve_proj = nn.Linear(C, K * config.head_dim, bias=False)

  def initialise(self):
    if hasattr(self, "ve_gate"):
      nn.init.uniform_(self.ve_gate.weight, 0, 0.02)
    if hasattr(self, "ve_proj"):
      bound = (3 / self.config.hidden_size) ** 0.5
      nn.init.uniform_(self.ve_proj.weight, -bound, bound)

  def project(self, x, shared):
    x, added = x if isinstance(x, tuple) else (x, None)
    q, k, v = super().project(x, shared)
    if hasattr(self, "ve_gate"):
      gate = self.config.gate_scale * self.ve_gate(x[..., : self.ve_gate.in_features]).sigmoid()  # (B, T, K)
      rows = self.ve_proj(shared[0].to(x.device)) if hasattr(self, "ve_proj") else shared[self.layer].to(x.device)
      v = v + gate.transpose(1, 2)[..., None] * split_heads(rows, self.config.head_dim)
    return q, k, v if added is None else v + split_heads(added, self.config.head_dim)


class ShortcutsLayer(Layer):
  """x: the stream (B, T, C), or two lanes (B, T, 2, C). Returns, beside it, what the tail's network has read."""

  def sublayers(self, x, reads, shared, step):
    reads = Reads(*(part.to(x.device) if isinstance(part, torch.Tensor) else part for part in reads))
    lanes = list(x.unbind(2)) if x.ndim == 4 else [x] * (1 if reads.post is None else 2)
    if reads.skip is not None:
      lanes = [lane + reads.skip * reads.mirrored for lane in lanes]
    if reads.own is not None:
      lanes = [reads.own * lane for lane in lanes]
    if reads.first is not None:
      lanes = [lane + reads.first * reads.start for lane in lanes]
    before_last, added = lanes[0], None  # added: to the values
    if reads.tail is not None:
      *network, middle = (part.to(x.device) for part in reads.tail)
      weights, sources = tail_weights(before_last, *network), (reads.start, middle, before_last)
      lanes[0] = before_last + weighted(weights[..., :3], *sources)
      added = weighted(weights[..., 3:], *sources) if weights.shape[-1] > 3 else None
    normed = self.input_layernorm(lanes[0] if reads.saved is None else reads.saved)
    y, shared = self.self_attn(normed if added is None else (normed, added), shared, step)
    lanes = self.written(lanes, y, reads, 0)
    inner = self.post_attention_layernorm(lanes[-1])
    lanes = self.written(lanes, self.mlp(inner), reads, 1)
    x = lanes[0] if len(lanes) == 1 else torch.stack(lanes, 2)
    return x, before_last, self.leave(inner, shared, step)

  def written(self, lanes, y, reads, mlp):
    if len(lanes) == 1:
      return [lanes[0] + y]
    return [reads.kept[mlp] * lane + post * y for lane, post in zip(lanes, reads.post[mlp])]


class Tail(nn.Module):
  def __init__(self, config, numbers):
    super().__init__()
    self.w1 = nn.Linear(config.hidden_size, config.mudd_width, bias=False)
    self.w2 = nn.Linear(config.mudd_width, numbers, bias=False)
    self.bias = nn.Parameter(torch.zeros(numbers))

  def initialise(self):
    bound = self.w1.in_features ** -0.5
    nn.init.uniform_(self.w1.weight, -bound, bound)
    nn.init.zeros_(self.w2.weight)

  def network(self):
    return self.w1.weight, self.w2.weight, self.bias


class ValueTables(Backbone):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    L, width = config.num_hidden_layers, config.num_key_value_heads * config.head_dim
    check_choice("value_from", config.value_from, ("tables", "x0"))
    self.value_embeds = nn.ModuleDict(
      {str(i): nn.Embedding(config.vocab_size, width) for i in range(L)
       if adds_values(config, i) and config.value_from == "tables"})

  def initialise(self):
    bound = (3 / self.config.hidden_size) ** 0.5
    for table in self.value_embeds.values():
      nn.init.uniform_(table.weight, -bound, bound)

  def begin(self, x, tokens):
    if self.config.value_from == "x0":
      return (x,)
    return tuple(self.value_embeds[str(i)](tokens) if str(i) in self.value_embeds else None
                 for i in range(self.config.num_hidden_layers))


class ShortcutsBackbone(ValueTables):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    L = config.num_hidden_layers
    if config.resid:
      self.resid_lambdas = nn.Parameter(torch.linspace(1.15, 1.05, L))
    if config.x0:
      self.x0_lambdas = nn.Parameter(torch.linspace(0.2, 0.05, L))
    if config.backout:
      self.backout_lambda = nn.Parameter(torch.full((1,), 0.2))
    if config.unet and L > 1:
      self.skip_weights = nn.Parameter(torch.ones(L // 2))
    if config.lanes_from:
      self.lane_resid = nn.Parameter(torch.full((L - config.lanes_from, 2), 1.1 ** 0.5))
      self.lane_post = nn.Parameter(torch.tensor([[1, 1.5], [1, 1]]).repeat(L - config.lanes_from, 1, 1))
    check_choice("mudd_tail", config.mudd_tail, ("none", "residual", "both"))
    if config.mudd_tail != "none":
      self.mudd_tail = nn.ModuleList([Tail(config, 6 if config.mudd_tail == "both" else 3), Tail(config, 3)])

  def reads(self, i, start, outs):
    """outs: what the layers so far have put out."""
    config, L = self.config, self.config.num_hidden_layers
    decoder, first_with_lanes = L - L // 2, config.lanes_from or L
    return Reads(
      own=self.resid_lambdas[i] if config.resid else None,
      first=self.x0_lambdas[i] if config.x0 else None,
      start=start,
      skip=self.skip_weights[i - decoder] if config.unet and i >= decoder else None,
      mirrored=outs[L - 1 - i] if config.unet and i >= decoder else None,
      saved=outs[config.attn_saved] if 0 < config.attn_saved < i else None,
      kept=self.lane_resid[i - first_with_lanes] if i >= first_with_lanes else None,
      post=self.lane_post[i - first_with_lanes] if i >= first_with_lanes else None,
      tail=(*self.mudd_tail[0].network(), outs[L // 2]) if config.mudd_tail != "none" and i == L - 1 else None)

  def forward(self, tokens, step):
    config, x = self.config, self.embed(tokens, step)
    if config.embed_norm:
      x = unit_rms(x, config.rms_norm_eps)
    start, anchor, outs, shared = x, None, [], self.begin(x, tokens)
    for i, layer in enumerate(self.layers):
      x, anchor = self.before(i, x, anchor)
      x, before_last, shared = layer(x, self.reads(i, start, outs), shared, step)
      outs.append(x if x.ndim == 3 else x[..., 0, :])
      x = self.behind(i, x, anchor)
    x = x if x.ndim == 3 else x.mean(2)
    middle = outs[len(outs) // 2].to(x.device)
    if config.mudd_tail != "none":
      weights = tail_weights(x, *(part.to(x.device) for part in self.mudd_tail[1].network()))
      x = x + weighted(weights, start.to(x.device), middle, before_last)
    return self.norm(x - self.backout_lambda.to(x.device) * middle if config.backout else x)


class ValuesAlone(ValueTables):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    stream = (config.resid, config.x0, config.backout, config.embed_norm, config.unet and config.num_hidden_layers > 1,
              config.lanes_from > 0, config.attn_saved > 0, config.mudd_tail != "none")
    if any(stream):
      raise ValueError(f"{config.arch} do not combine: both change the stream; options may take that from shortcuts")


class StreamAlone(ShortcutsBackbone):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    if any(adds_values(config, i) for i in range(config.num_hidden_layers)) or config.mudd_tail == "both":
      raise ValueError(f"{config.arch} do not combine: both change a layer's own queries, keys and values; options may "
                       "take that from shortcuts")


class ShortcutValues(Llama):
  """Beside an owner of the stream: values from tables, or from the embedding."""
  config_class, backbone, attention = ShortcutsConfig, ValuesAlone, ShortcutsAttention


class ShortcutStream(Llama):
  """Beside an owner of values: all the rest."""
  config_class, backbone, layer = ShortcutsConfig, StreamAlone, ShortcutsLayer


class Shortcuts(Llama):
  config_class, backbone = ShortcutsConfig, ShortcutsBackbone
  layer, attention = ShortcutsLayer, ShortcutsAttention
  beside_owner = {"the stream": ShortcutValues, "a layer's own queries, keys and values": ShortcutStream}
