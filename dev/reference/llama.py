"""LLaMA in PyTorch, for reading and for checking: no kernels, one class per part of the model. With backbone gpt2 in
its configuration it is a GPT-2.

Letters: B batch, T time, C width, V vocabulary, L layers, H query heads, K key/value heads, D head width, F
feed-forward width. The state dict carries the names of a LLaMA checkpoint (model.layers.3.self_attn.q_proj.weight);
q_norm and k_norm appear where qk_norm is on, lm_head.weight where the embedding is not tied to it.

An architecture that connects layers across depth replaces what it changes: how an attention projects its input
(project), what it makes of its values (mix), which keys and values it attends to (route) and how (attend), the two
sublayers (Layer.sublayers), or what flows from layer to layer (Backbone).

A layer takes and returns the stream x and two tuples. `carried` belongs to the classes of Layer and Backbone: what they
carry beside the stream. `shared` is what attentions leave for later ones. It starts as Backbone.begin says. Four
methods add to it: Layer.observe sees the stream in front of the layer, Attention.keep the values as projected,
Attention.leave the keys and values, Layer.leave the feed-forward input. A layer changes neither what it takes nor the
model, so each may lie on another device, be sharded, or be computed twice.

`step` says where the tokens stand, and keeps the keys and values that later ones attend to. A module whose parameters
start with other values sets them in a method initialise.
"""
import dataclasses
import math
import typing

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .config import Config, applications, check_choice
from .engram import Engram
from .gpt2 import Gpt2MLP, LayerNorm


class Step(typing.NamedTuple):
  """Where the T tokens of one call stand. S counts those of earlier calls, too, whose keys and values are cached."""
  positions: torch.Tensor  # (B or 1, T)
  visible: torch.Tensor  # (B or 1, 1, T, S): may the query read the key?
  tokens: torch.Tensor  # (B, S) or, where nothing asks for those before them, (B, T); -1 at padding
  documents: torch.Tensor | None = None  # (B or 1, T), their numbers along a row; None: each row is one
  remember: typing.Callable | None = None  # (keys, values, run): appends them to this run's, and returns all
  run: int | None = None  # which run of a layer this is, of all in one pass of the model; None: each runs once
  start: torch.Tensor | None = None  # (B, T, C), what this pass begins with; None: the embeddings
  before: int = 0  # runs of layers in earlier passes


def documents_of(positions):
  """The number of each token's document in its row, from 0. One begins wherever positions (B or 1, T) do not go on."""
  return F.pad((positions.diff() != 1).cumsum(1), (1, 0))


def of_one_document(documents):
  """Are query and key of the same document? (B or 1, 1, T, T)"""
  return (documents[:, :, None] == documents[:, None])[:, None]


def whole(tokens, positions=None):
  """The step of tokens (B, T) with none before them. positions (B, T): where they start again, documents begin."""
  T = tokens.shape[1]
  visible = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()[None, None]
  if positions is None:
    return Step(torch.arange(T, device=tokens.device)[None], visible, tokens)
  documents = documents_of(positions)
  return Step(positions, visible & of_one_document(documents), tokens, documents)


def unit_rms(x, eps):
  """x / sqrt(mean(x^2) + eps), over the last dimension, at least in float32."""
  wide = x.to(torch.promote_types(x.dtype, torch.float32))
  return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x)


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
    return LayerNorm(config.hidden_size, config.rms_norm_eps, bias and config.bias)
  return RMSNorm(config.hidden_size, config.rms_norm_eps)


def backbone_mlp(config, inner):
  if config.backbone == "gpt2":
    return Gpt2MLP(config.hidden_size, inner, config.activation_function, config.bias)
  return MLP(config.hidden_size, inner)


def frequencies(D, theta, scaling):
  """Radians a position for each pair of channels: (D/2). Scaling slows down all (linear), or those that turn seldom."""
  frequency = theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
  if scaling is None:
    return frequency
  kept = {"linear": lambda: 0, "llama3": lambda: llama3_share(frequency, scaling),
          "yarn": lambda: yarn_share(D, theta, scaling)}[scaling["rope_type"]]()
  return frequency * (kept + (1 - kept) / scaling["factor"])


def llama3_share(frequency, scaling):
  """Of each frequency, how much stays: by how often the pair turns in the original length."""
  low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
  turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
  return ((turns - low) / (high - low)).clamp(0, 1)


def yarn_share(D, theta, scaling):
  """The same by the pair's number, between those that turn beta_fast and beta_slow times (arXiv 2309.00071)."""
  length = scaling["original_max_position_embeddings"]
  low, high = (D * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
               for turns in (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1))
  if scaling.get("truncate", True):
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, D - 1)
  width = high - low or 0.001
  return 1 - ((torch.arange(D // 2, dtype=torch.float64) - low) / width).clamp(0, 1)


def rope_factor(scaling):
  """What queries and keys are multiplied by as they are rotated: yarn's attention factor."""
  if scaling is None or scaling["rope_type"] != "yarn":
    return 1
  if scaling.get("attention_factor") is not None:
    return scaling["attention_factor"]
  def factor(scale):
    return 0.1 * scale * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1
  own, every = scaling.get("mscale"), scaling.get("mscale_all_dim")
  return factor(own) / factor(every) if own and every else factor(1)


def rotate(x, positions, theta, scaling=None):
  """Half-split: channel j turns together with channel j + D/2. x: (B, heads, T, D); positions: (B or 1, T)."""
  D = x.shape[-1]
  exact = "cpu" if x.device.type == "mps" else x.device  # has float64
  angle = positions[:, None, :, None].to(exact) * frequencies(D, theta, scaling).to(exact)  # (B or 1, 1, T, D/2)
  factor = rope_factor(scaling)
  cos, sin = ((factor * part).to(x.dtype).to(x.device) for part in (angle.cos(), angle.sin()))
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
    self.q_proj = nn.Linear(C, H * D, bias=bias or config.qkv_bias)
    self.k_proj = nn.Linear(C, K * D, bias=bias or config.qkv_bias)
    self.v_proj = nn.Linear(C, K * D, bias=bias or config.qkv_bias)
    self.o_proj = nn.Linear(H * D, C, bias=bias)
    if config.qk_norm:
      self.q_norm = RMSNorm(D, config.qk_norm_eps)
      self.k_norm = RMSNorm(D, config.qk_norm_eps)

  def project(self, x, shared):
    """Queries (B, H, T, D), keys and values (B, K, T, D), neither normed nor rotated yet."""
    return tuple(split_heads(proj(x), self.config.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))

  def placed(self, x, norm, step):
    """Queries or keys normed and rotated, where the backbone does that; None, of a layer without keys, as it is."""
    if x is not None and self.config.qk_norm:
      x = self.get_submodule(norm)(x)
    if x is not None and self.config.backbone == "llama":
      x = rotate(x, step.positions, self.config.rope_theta, self.config.rope_scaling)
    return x

  def mix(self, q, k, v, shared):
    """The values (B, K, T, D) that the layer leaves and attends to, from its own queries, keys and values; the first
    two are normed and rotated."""
    return v

  def keep(self, values, shared):
    """What later layers' project() may read: shared, with what they need of this layer's values as project() made
    them."""
    return shared

  def leave(self, keys, values, shared):
    """What later layers may read: shared, with what they need of this layer's keys, normed and rotated, and of its
    values, mixed."""
    return shared

  def route(self, keys, values, shared):
    """The keys and values (B, K or H, T, D) to attend to, from the layer's own and what leave() returned.

    What is made of a token must not depend on other tokens: the result is cached.
    """
    return keys, values

  def attend(self, q, k, v, visible, scale, shared):
    """softmax(scale q k^T) v over the visible keys: (B, H, T, D). shared: what earlier layers left."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)

  def forward(self, x, shared, step):  # x: (B, T, C)
    """The output (B, T, C), and what later layers may read."""
    q, k, v = self.project(x, shared)
    left = self.keep(v, shared)
    q, k = self.placed(q, "q_norm", step), self.placed(k, "k_norm", step)
    v = self.mix(q, k, v, shared)
    left = self.leave(k, v, left)
    k, v = self.route(k, v, left)
    run = self.layer if step.run is None else step.run
    if step.remember is not None:
      k, v = step.remember(k, v, step.before + run)  # (B, heads, S, D)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    visible, window, scale = step.visible, self.config.window_of(self.layer), 1 / math.sqrt(self.config.head_dim)
    if window is not None:
      T, S = visible.shape[-2:]
      visible = visible.triu(S - T - window + 1)
    if self.config.scale_attn_by_inverse_layer_idx:
      scale /= run + 1
    out = self.attend(q, k, v, visible, scale, shared)
    return self.o_proj(out.transpose(1, 2).flatten(2)), left


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
  gradient_checkpointing = False  # in training, computed again in the backward pass instead of kept

  def __init__(self, config, layer, attention):
    super().__init__()
    self.config, self.layer = config, layer
    self.input_layernorm = backbone_norm(config)
    self.self_attn = attention(config, layer)
    self.post_attention_layernorm = backbone_norm(config)
    check_choice("block_norm", config.block_norm, ("pre", "branch", "sum"))
    if config.block_norm != "pre":
      if type(self).sublayers is not Layer.sublayers:
        raise ValueError(f"a layer of {config.arch} takes no block_norm here")
      self.input_layernorm_2, self.post_attention_layernorm_2 = backbone_norm(config), backbone_norm(config)
    self.mlp = backbone_mlp(config, self.inner_width(config, layer))
    self.engram = Engram(config, layer) if layer in config.engram_layers else None

  def __call__(self, *inputs):
    if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
      return checkpoint(super().__call__, *inputs, use_reentrant=False)
    return super().__call__(*inputs)

  def forward(self, x, carried, shared, step):
    """The sublayers, and in front of them what is written to the stream, or streams, and what is read of it there."""
    x = x if self.engram is None else self.engram(x, step.tokens, step.documents)
    return self.sublayers(x, carried, self.observe(x, shared), step)

  def inner_width(self, config, layer):
    """Of the feed-forward part."""
    return config.intermediate_size

  def sublayers(self, x, carried, shared, step):
    y, shared = self.self_attn(self.input_layernorm(x), shared, step)
    x = self.add(x, y, "input_layernorm_2")
    inner = self.post_attention_layernorm(x)
    return self.add(x, self.mlp(inner), "post_attention_layernorm_2"), carried, self.leave(inner, shared, step)

  def observe(self, x, shared):
    """What this attention and later ones may read: shared, with what they need of the stream in front of the layer."""
    return shared

  def leave(self, inner, shared, step):
    """What later layers may read: shared, with what they need of this layer's feed-forward input (B, T, C)."""
    return shared

  def add(self, x, y, norm):
    """The stream with a sublayer's output, and block_norm's second norm on one of them."""
    kind = self.config.block_norm
    if kind == "branch":
      return x + self.get_submodule(norm)(y)
    return self.get_submodule(norm)(x + y) if kind == "sum" else x + y


class Backbone(nn.Module):
  def __init__(self, config, layer, attention):
    super().__init__()
    self.config = config
    self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    if config.backbone == "gpt2":
      self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
    self.runs, self.passes = applications(config)
    self.layers = nn.ModuleList(layer(config, i, attention) for i in range(config.num_hidden_layers))
    if len(self.runs) > len(self.layers) and (config.arch != config.backbone or config.engram_layers):
      raise ValueError(f"{config.arch} cannot run layers several times here, and none with engram_layers")
    self.norm = backbone_norm(config)
    if config.exit_gate:
      self.early_exit_gate = nn.Linear(config.hidden_size, 1)

  def exits(self, tokens, step, forward=None):
    """What the head reads after each pass of a stack; of other models, there is one. forward: of one pass."""
    states, forward = [], forward or self.forward
    for r in range(self.config.passes_of_model()):
      states.append(forward(tokens, step._replace(start=states[-1] if r else None, before=r * len(self.runs))))
    return states

  def embed(self, tokens, step):
    if step.start is not None:
      return step.start
    x = self.embed_tokens(tokens)
    return x + self.embed_positions(step.positions) if self.config.backbone == "gpt2" else x

  def before(self, run, x, anchor):
    """In front of a run: the stream, and what every pass adds to it, which is the stream in front of the core."""
    if not self.passes or run != self.passes[0]:
      return x, anchor
    if self.config.loop_norm == "all":
      x = unit_rms(x, self.config.rms_norm_eps)
    return x, x

  def behind(self, run, x, anchor):
    """Behind a run: the stream, which a pass that ends norms and adds the anchor to."""
    config = self.config
    if run + 1 not in self.passes[1:]:
      return x
    if config.loop_norm != "none":
      x = unit_rms(x, config.rms_norm_eps)
    if config.loop_alpha != 0 and (run + 1 != self.passes[-1] or config.loop_end):
      x = x + config.loop_alpha * anchor.to(x.device)
    return x

  def begin(self, x, tokens):
    """What the first layer finds in shared. x: the embeddings, (B, T, C)."""
    return ()

  def run_layers(self, x, carried, shared, step):
    """All runs of layers, with the loop's passes: the stream, or several (B, T, E, C), and what is carried."""
    anchor = None
    for run, layer in enumerate(self.runs):
      x, anchor = self.before(run, x, anchor)
      x, carried, shared = self.layers[layer](x, carried, shared, step._replace(run=run))
      x = self.behind(run, x, anchor)
    return x, carried

  def forward(self, tokens, step):
    """One pass."""
    x = self.embed(tokens, step)
    return self.norm(self.run_layers(x, (), self.begin(x, tokens), step)[0])


def softcap(logits, c):
  """c tanh(logits / c), as in Gemma 2; the logits themselves where c is 0."""
  return c * torch.tanh(logits / c) if c else logits


class Llama(nn.Module):
  """logits = model(tokens); loss = model.loss(tokens, targets). tokens, targets: (B, T); logits: (B, T, V). Behind them
  may stand positions (B, T), which start again where a document begins."""

  config_class, backbone, layer, attention = Config, Backbone, Layer, Attention
  # For combined.py: does its Layer.observe need one stream (B, T, C)? {what another part owns: the class in its place}
  observes_stream, beside_owner = False, {}

  def __init__(self, config):
    super().__init__()
    self.config = config
    self.model = self.backbone(config, self.layer, self.attention)
    if not config.tie_word_embeddings:
      self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    for module in self.modules():
      if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=config.initializer_range)
      if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    with torch.no_grad():
      for name, parameter in self.named_parameters() if config.backbone == "gpt2" else ():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
          parameter /= math.sqrt(2 * len(self.model.runs))
      for module in self.modules():
        if hasattr(module, "initialise"):
          module.initialise()

  def head(self, x):
    logits = F.linear(x, self.model.embed_tokens.weight) if self.config.tie_word_embeddings else self.lm_head(x)
    return softcap(logits, self.config.final_logit_softcapping)

  def forward(self, tokens, positions=None):
    return self.head(self.model.exits(tokens, whole(tokens, positions))[-1])

  def loss(self, tokens, targets, positions=None, z_loss=0.0):
    """Mean cross-entropy over the targets that are not -1, and z_loss times the mean of logsumexp^2 of their logits;
    with an exit gate, the objective of all exits."""
    if self.config.exit_gate:
      return self.exit_loss(tokens, targets, positions)
    logits, targets = self(tokens, positions).flatten(0, 1), targets.flatten()
    ce = F.cross_entropy(logits, targets, ignore_index=-1)
    return ce + z_loss * logits[targets >= 0].logsumexp(-1).square().mean() if z_loss else ce

  def exit_loss(self, tokens, targets, positions):
    """Each exit's loss counts as much as the gates let a token leave there; the entropy of that is rewarded."""
    left, sums = 0.0, 0.0  # left: ln of how likely a token is still there
    states = self.model.exits(tokens, whole(tokens, positions))
    for t, state in enumerate(states):
      ce = F.cross_entropy(self.head(state).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
      z = self.model.early_exit_gate(state).flatten()
      log_p = left + F.logsigmoid(z) if t + 1 < len(states) else left
      sums = sums + log_p.exp() * (ce + self.config.exit_beta * log_p)
      left = left + F.logsigmoid(-z)
    return sums[targets.flatten() >= 0].mean()


@dataclasses.dataclass
class Gpt2Config(Config):
  arch: str = "gpt2"
  backbone: str = "gpt2"


class Gpt2(Llama):
  config_class = Gpt2Config
