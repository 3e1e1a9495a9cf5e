"""MoDA's naive reference of its kernel, as the attention function of transformers' LLaMA, or of its Qwen3 for qk_norm.

Their models for language are not public. What layers leave as slots is as crossply has it: keys and values of the
layer's attention, and two projections of the normed feed-forward input. Queries of one key/value head are grouped as
their kernel takes them: T*G rows of K heads.
"""
import math
import typing

import torch
from torch import nn

from . import common

ABOUT = "hustvl/MoDA"
ARCHITECTURES = "moda"
CHECKOUTS, PACKAGES = {"MoDA": "36a225f4aefa016da7c3e53517d617de07e384d6"}, ""
PARTS = ("_ref_seq_kv_limit", "naive_mixture_of_depth_causal_ref")


def load(root):
  global theirs, transformers, llama
  import transformers
  from transformers.models.llama import modeling_llama as llama

  theirs = common.parts_of_script(root / "MoDA/libs/moda_triton/fla/ops/moda/moda_v14.py", PARTS, math=math,
                                  Optional=typing.Optional, Tuple=typing.Tuple)
  transformers.AttentionInterface.register("moda", attend)


def models():
  ranges = [dict(depth_start=start, depth_window=window) for start, window in ((1, 0), (1, 2), (2, 1), (3, 0))]
  for slots in ranges:
    for options in common.crossed(K=(4, 2, 1), tied=(True, False), seed=range(2)):
      yield "moda", dict(arch="moda", **slots, **options)
  for slots in ranges[:2]:
    for options in common.crossed(K=(4, 2), tied=(True, False), seed=range(2)):
      yield "moda, slots of attention alone", dict(arch="moda", ffn_kv=False, **slots, **options)
  for slots in ranges[:3]:
    for options in common.crossed(K=(4, 2), tied=(True, False), head_dim=(2, 6), seed=(0,)):
      yield "moda, qk_norm", dict(arch="moda", qk_norm=True, rms_norm_eps=1e-2, qk_norm_eps=1e-2, **slots, **options)


def token_major(slots):
  """(B, K, T, D) each, as (B, T*slots, K, D)."""
  return torch.stack([slot.transpose(1, 2) for slot in slots], dim=2).flatten(1, 2)


def attend(module, q, k, v, *_, scaling, **__):
  """q: (B, H, T, D); k, v: (B, K, T, D). module.below: the layers it reads; module.slots: of each layer so far."""
  T, G = q.shape[2], q.shape[1] // k.shape[1]
  rows = q.unflatten(1, (-1, G)).permute(0, 3, 2, 1, 4).flatten(1, 2)  # (B, T*G, K, D)
  slots = [slot for layer in module.below for slot in module.slots[layer]]
  kd, vd = map(token_major, zip(*slots)) if slots else (None, None)
  out, _ = theirs.naive_mixture_of_depth_causal_ref(
    rows, k.transpose(1, 2), v.transpose(1, 2), kd, vd, scaling, moda_group_num=G)
  module.slots[module.layer_idx] = [(k, v)]
  return out.unflatten(1, (T, G)).transpose(2, 3).flatten(2, 3), None


def remember_places(attention, args, kwargs):
  attention.places = kwargs.get("position_embeddings", ())


def leave(layer, layer_idx, config):
  """A hook of the layer's feed-forward, which leaves the second slot."""
  def hook(mlp, args):
    k, v = (proj(args[0]).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for proj in (mlp.depth_k_proj, mlp.depth_v_proj))
    if config.qk_norm:
      k = mlp.depth_k_norm(k)
    k = llama.apply_rotary_pos_emb(k, k, *layer.self_attn.places)[0]
    layer.self_attn.slots.setdefault(layer_idx, []).append((k, v))

  return hook


def build(config):
  plain, model_class = common.llama_config(config), llama.LlamaForCausalLM
  if config.qk_norm:
    keys = {key: value for key, value in plain.to_dict().items() if key not in ("model_type", "architectures")}
    plain, model_class = transformers.Qwen3Config(**keys), transformers.Qwen3ForCausalLM
  plain._attn_implementation = "moda"
  module, slots, L = model_class(plain), {}, config.num_hidden_layers
  window = config.depth_window or L
  below = [range(max(0, v - window), v) if v >= config.depth_start else range(0) for v in range(L)]
  for i, layer in enumerate(module.model.layers):
    layer.self_attn.below, layer.self_attn.slots = below[i], slots
    layer.self_attn.register_forward_pre_hook(remember_places, with_kwargs=True)
    if not config.ffn_kv or not any(i in layers for layers in below):
      continue
    for name in ("depth_k_proj", "depth_v_proj"):
      setattr(layer.mlp, name, nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False))
    if config.qk_norm:
      layer.mlp.depth_k_norm = llama.LlamaRMSNorm(config.head_dim, config.qk_norm_eps)
    layer.mlp.register_forward_pre_hook(leave(layer, i, config))
  return module


def weights(config, w):
  return common.renamed(w)
