"""SkyeGunasekaran/SATFormer: its SATFormer, ResFormer (our variant plus), DenseFormer, MUDDFormer and
hyper-connections.

They are built on flash-linear-attention, whose modules run Triton kernels, and on flash-attn, which needs a GPU. What
is missing on a CPU is replaced by what it computes: the norm, rotary positions and the gated feed-forward in `fla`,
softmax attention by PyTorch's own. The attention that two of them take from fla itself (DenseFormer,
hyper-connections) is the file fla/layers/attn.py of the checkout flash-linear-attention.
"""
import importlib.machinery
import sys
import types

import torch
import torch.nn.functional as F
from reference import llama
from torch import nn

from . import common

ABOUT = "SkyeGunasekaran/SATFormer"
ARCHITECTURES = "satformer, resformer, denseformer, mudd, hyper"
CHECKOUTS = {
  "SATFormer": "98520bff1ff1788e3ff45522fffb5c76b10b9a28",
  "flash-linear-attention": "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89",
}
PACKAGES = "transformers-4.51.1"
QK_NORM_EPS = 1e-5  # fla's default, which these models do not change
# Our architecture: their package in models/, which ends the names of its files too, and what starts their classes.
THEIRS = {
  "satformer": ("satformer", "SATFormer"),
  "resformer": ("resformer", "ResFormer"),
  "denseformer": ("denseformer", "DenseFormer"),
  "mudd": ("muddformer", "MUDDFormer"),
  "hyper": ("hyperconnections", "HyperConnections"),
}


class RMSNorm(nn.RMSNorm):
  def __init__(self, hidden_size, eps=QK_NORM_EPS, dtype=None):
    super().__init__(hidden_size, eps=eps)


class RotaryEmbedding(nn.Module):
  def __init__(self, dim, base):
    super().__init__()
    self.base = base

  def forward(self, q, k, seqlen_offset=0, max_seqlen=None, cu_seqlens=None):  # (B, T, heads, D)
    if seqlen_offset or cu_seqlens is not None:
      raise NotImplementedError("only whole sequences")
    positions = torch.arange(q.shape[1], device=q.device)[None]
    return tuple(llama.rotate(x.transpose(1, 2), positions, self.base).transpose(1, 2) for x in (q, k))


class GatedMLP(llama.MLP):
  def __init__(self, hidden_size, intermediate_size, hidden_ratio=None, hidden_act="swish", fuse_swiglu=False):
    super().__init__(hidden_size, intermediate_size)

  def forward(self, x, **_):
    return super().forward(x)


def attend(q, k, v, causal, window_size):  # (B, T, heads, D)
  if not causal or window_size != (-1, -1):
    raise NotImplementedError("only causal attention without a window")
  groups = q.shape[2] // k.shape[2]
  q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
  return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def unused(*_, **__):
  raise NotImplementedError("not needed for whole sequences without padding")


def stand_in(name, path=(), **members):
  """A module under this name, a package that looks for its own modules in `path`."""
  module = sys.modules[name] = types.ModuleType(name)
  module.__path__ = list(map(str, path))
  module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
  vars(module).update(members)


def load(root):
  common.use(root / "SATFormer")
  stand_in("flash_attn", flash_attn_func=attend, flash_attn_varlen_func=unused)
  stand_in("fla")
  stand_in("fla.modules", RMSNorm=RMSNorm, RotaryEmbedding=RotaryEmbedding, GatedMLP=GatedMLP,
           FusedCrossEntropyLoss=unused, FusedLinearCrossEntropyLoss=unused)
  stand_in("fla.modules.l2warp", l2_warp=unused)
  stand_in("fla.models")
  stand_in("fla.models.utils", Cache=type("Cache", (), {}), FLAGenerationMixin=type("FLAGenerationMixin", (), {}))
  stand_in("fla.models.modeling_layers", GradientCheckpointingLayer=nn.Module)  # none is checkpointed
  stand_in("fla.layers", path=[root / "flash-linear-attention" / "fla" / "layers"])
  stand_in("fla.layers.utils", pad_input=unused, unpad_input=unused)
  stand_in("fla.ops")
  stand_in("fla.ops.utils")
  stand_in("fla.ops.utils.index", prepare_lens_from_mask=unused)
  # What their ResFormer imports under this name lies under another in the published tree.
  sys.modules["models.resformer.attn"] = importlib.import_module("models.resformer.attn_resformer")
  for package, _ in THEIRS.values():
    for kind in ("configuration", "modeling"):
      importlib.import_module(f"models.{package}.{kind}_{package}")


def models():
  backbones = [dict(qk_norm_eps=QK_NORM_EPS, **options) for options in common.crossed(
    K=(4, 2), tied=(True, False), qk_norm=(False, True), rms_norm_eps=(1e-6, 1e-3))]
  rows = [
    *((f"satformer {gate}", dict(arch="satformer", gate=gate))
      for gate in ("relu", "sigmoid", "softmax", "softmax_sigmoid", "tanh", "identity")),
    ("satformer, last_k", dict(arch="satformer", gate="relu", last_k=2)),
    ("resformer plus", dict(arch="resformer", variant="plus")),
    ("resformer plus, last_k", dict(arch="resformer", variant="plus", last_k=2)),
    *(("denseformer", dict(arch="denseformer", dilation=dilation, period=period))
      for dilation, period in ((1, 1), (2, 1), (1, 2), (2, 3), (3, 2))),
    ("mudd, norm prepost", dict(arch="mudd", norm="prepost")),
    ("mudd, norm none", dict(arch="mudd", norm="none")),
    *((f"hyper, norm {norm}", dict(arch="hyper", prenorm="rmsnorm", layer_index="sublayer", norm=norm, rate=rate))
      for norm in ("rmsnorm", "layernorm") for rate in (1, 2, 4)),
    ("hyper, norm rmsnorm, its own epsilon",
     dict(arch="hyper", prenorm="rmsnorm", layer_index="sublayer", norm="rmsnorm", dynamic_norm_eps=2.0**-23)),
    ("hyper, static", dict(arch="hyper", prenorm="rmsnorm", layer_index="sublayer", dynamic=False)),
  ]
  for number, (row, options) in enumerate(rows):
    for seed, backbone in enumerate(backbones):
      yield row, dict(options, seed=16 * number + seed, **backbone)


def build(config):
  package, stem = THEIRS[config.arch]
  configuration = getattr(sys.modules[f"models.{package}.configuration_{package}"], f"{stem}Config")
  model = getattr(sys.modules[f"models.{package}.modeling_{package}"], f"{stem}ForCausalLM")
  more = {
    "satformer": lambda: dict(value_residual_gate=config.gate, value_residual_last_k=config.last_k or None),
    "resformer": lambda: dict(value_residual_last_k=config.last_k or None),
    "denseformer": lambda: dict(dwa_dilation=config.dilation, dwa_period=config.period),
    "mudd": lambda: dict(use_pre_post_da_norm=config.norm == "prepost", param_realloc=False),
    "hyper": lambda: dict(expansion_rate=config.rate, use_dynamic_hc=config.dynamic,
                          hc_norm_type="layer" if config.norm == "layernorm" else "rms"),
  }.get(config.arch, dict)()
  module = model(configuration(
    vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
    num_hidden_layers=config.num_hidden_layers, num_heads=config.num_attention_heads,
    num_kv_heads=config.num_key_value_heads, qk_norm=config.qk_norm, rope_theta=config.rope_theta,
    norm_eps=config.rms_norm_eps, fuse_norm=False, fuse_swiglu=False, fuse_cross_entropy=False, use_cache=False,
    tie_word_embeddings=False, **more))
  for part in module.modules():
    # The norm in hyper-connections has no epsilon: PyTorch takes the type's own, and would take double's here.
    if isinstance(part, nn.RMSNorm) and part.eps is None:
      part.eps = getattr(config, "dynamic_norm_eps", 0) or 1e-6
  return module


def weights(config, w):
  state = common.renamed(
    w, ("embed_tokens", "embeddings"), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "mlp_norm"),
    ("self_attn.", "attn."))
  scalars = ("lambda2", "lambda_scale")  # theirs have no dimension
  return {name: tensor[0] if name.endswith(scalars) else tensor for name, tensor in state.items()}
