"""QLabs' looped transformer, with LLaMA's norms and feed-forward in its blocks: the passes, their norms and the anchor.

Not ours, and taken out: the norm of the embedding, those of queries and keys, and that the final norm has no gain.
"""
import sys
import types

import torch
from torch import nn

from . import common
from .nanochat import Normed

ABOUT = "qlabs-eng/scaling-exponents"
ARCHITECTURES = "llama with loops"
CHECKOUTS, PACKAGES = {"scaling-exponents": "9139c396957a57b6de9a1e7efe7e35a4a863f1a6"}, ""
NORMS = {"none": "none", "passes": "recurrence_only", "all": "prelude_and_recurrence"}


def attention(q, k, v, causal, window_size):
  """In place of their kernel's: (B, T, heads, D)."""
  group = q.shape[2] // k.shape[2]
  q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
  return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def load(root):
  global config_class, layers, llama, transformer
  from transformers.models.llama import modeling_llama as llama

  common.use(root / "scaling-exponents")
  sys.modules["models.flash_attention"] = types.SimpleNamespace(
    flash_attn_func=attention, is_flash_attention_3_available=lambda: False)
  sys.modules["models.optimizer"] = types.SimpleNamespace(build_optimizer=None)
  from models import layers, transformer
  from models.config import GPTConfig as config_class

  layers.norm = lambda x: x  # of heads; of streams, where ours are


def models():
  wide = dict(hidden_size=16, head_dim=4, loop="anchor", num_hidden_layers=4, seed=1)
  for options in common.crossed(loop_norm=("passes", "all", "none"), loop_end=(True, False), loop_passes=(1, 3),
                                K=(4, 2), tied=(True, False)):
    yield "tied", dict(arch="llama", **wide, **options, loop_layers=[1, 2, 1], loop_alpha=0.7)
  for options in common.crossed(loop_norm=("passes", "all"), loop_end=(True, False), tied=(True, False)):
    yield "untied", dict(arch="llama", **wide, **options, loop_tied=False, loop_passes=3, loop_layers=[0, 1, 1])
  yield "Operator-1", dict(arch="llama", **wide)


class Norms:
  """Their norm, called in one forward for the embedding, for passes, and at last for the head, which has ours."""

  def __init__(self, passes, eps):
    self.passes, self.eps, self.calls = passes, eps, 0

  def __call__(self, x):
    place, self.calls = self.calls, (self.calls + 1) % (self.passes + 2)
    inside = 0 < place <= self.passes
    return nn.functional.rms_norm(x, x.shape[-1:], eps=self.eps) if inside else x


def build(config):
  from reference.config import applications

  runs, passes = applications(config)
  R, C, eps = config.loop_passes, config.hidden_size, config.rms_norm_eps
  prelude, core = passes[0], passes[1] - passes[0]
  coda = len(runs) - passes[-1]
  model = transformer.TransformerGPT(config_class(
    sequence_len=64, vocab_size=config.vocab_size, n_layer=prelude + core + coda, n_head=config.num_attention_heads,
    n_kv_head=config.num_key_value_heads, n_embd=C, depth_scale_mode="loop" if config.loop_tied else "dep",
    core_repetitions=R, core_layer_count=core, prelude_layer_count=prelude, coda_layer_count=coda,
    recurrence_rmsnorm=NORMS[config.loop_norm], recurrence_emb_alpha=config.loop_alpha,
    decoder_inject=config.loop_end), pad_vocab_size_to=1)
  transformer.norm = Norms({"none": 0, "passes": R, "all": R + 1}[config.loop_norm], eps)
  model.cos, sin = model._precompute_rotary(64, config.head_dim, base=config.rope_theta)
  model.sin = -sin  # they turn the other way
  for block in model.transformer.h:
    block.attn = Normed(llama.LlamaRMSNorm(C, eps), block.attn)
    block.mlp = Normed(llama.LlamaRMSNorm(C, eps), llama.LlamaMLP(common.llama_config(config)))
  model.lm_head = Normed(llama.LlamaRMSNorm(C, eps), model.lm_head)
  return model


def weights(config, w):
  return common.renamed(
    w, ("model.norm.", "lm_head.norm."), ("lm_head.weight", "lm_head.inner.weight"), ("model.layers.", "trunk:h."),
    ("input_layernorm", "attn.norm"), ("post_attention_layernorm", "mlp.norm"), ("self_attn.", "attn.inner."),
    ("q_proj", "c_q"), ("k_proj", "c_k"), ("v_proj", "c_v"), ("o_proj", "c_proj"), (".mlp.", ".mlp.inner."),
    (".mlp.inner.norm", ".mlp.norm"), ("model.embed_tokens.", "trunk:wte."),
    ("trunk:", "transformer."))
