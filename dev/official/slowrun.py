"""slowrun's model, with LLaMA's norms and feed-forward in its blocks: skips from mirrored layers, values of the
embedding.

Not ours, and taken out: its norms without gains, the norm of queries and keys, the gate of each head's output and the
cap of logits; dropout, dropped layers and the second head are off. Its skip weights are one too few for an odd number
of layers; they are given one more, 0, for the layer in the middle.
"""
import types

import torch
from torch import nn

from . import common
from .nanochat import Normed, UnitRms
from .qlabs import attention

ABOUT = "qlabs-eng/slowrun"
ARCHITECTURES = "shortcuts with unet, value_from x0"
CHECKOUTS, PACKAGES = {"slowrun": "fd342f02affab8b39579761115c61b7d975f0430"}, ""


def load(root):
  global llama, theirs
  from transformers.models.llama import modeling_llama as llama

  names = ("GPTConfig", "has_ve", "apply_rotary_emb", "CausalSelfAttention", "MLP", "Block", "GPT")
  theirs = common.parts_of_script(
    root / "slowrun/train.py", names, LOGIT_CAP=0, args=types.SimpleNamespace(mtp_weight=0),
    norm=lambda x: x,  # of heads; of streams, where ours are
    flash_attn=types.SimpleNamespace(flash_attn_func=attention),
    **dict.fromkeys(("MAX_SEQ_LEN", "DEPTH", "N_HEAD", "N_EMBD", "WINDOW_PATTERN")))  # defaults that are not used


def models():
  wide = dict(arch="shortcuts", hidden_size=16, head_dim=4, gate_channels=12, gate_scale=2.0, backout=False)
  for options in common.crossed(K=(4, 2, 1), tied=(True, False), embed_norm=(True, False), seed=range(2)):
    yield "shortcuts, unet, value_from x0", dict(unet=True, value_from="x0", **wide, **options)
  for options in common.crossed(K=(4, 2), tied=(True, False), seed=range(2)):
    yield "shortcuts, value_from x0", dict(value_from="x0", **wide, **options)


class Open(nn.Module):
  """In the place of the gate of heads: lets all pass."""

  def forward(self, x):
    return torch.full_like(x[..., :1], torch.inf)


def build(config):
  C, eps, plain = config.hidden_size, config.rms_norm_eps, common.llama_config(config)
  model = theirs.GPT(theirs.GPTConfig(
    sequence_len=64, vocab_size=config.vocab_size, n_layer=config.num_hidden_layers, n_head=config.num_attention_heads,
    n_kv_head=config.num_key_value_heads, n_embd=C, window_pattern="L", stoch_depth=0), pad_vocab_size_to=1)
  model.cos, sin = model._precompute_rotary(64, config.head_dim, base=config.rope_theta)
  model.sin = -sin  # they turn the other way
  model.skip_weights = nn.Parameter(torch.zeros(config.num_hidden_layers - config.num_hidden_layers // 2))
  for block in model.transformer.h:
    block.attn.attn_gate = Open()
    if block.attn.ve_gate is not None:
      block.attn.ve_gate_channels = config.gate_channels
      block.attn.ve_gate = nn.Linear(config.gate_channels, config.num_key_value_heads, bias=False)
    block.attn = Normed(llama.LlamaRMSNorm(C, eps), block.attn)
    block.mlp = Normed(llama.LlamaRMSNorm(C, eps), llama.LlamaMLP(plain))
  if config.embed_norm:
    model.transformer.wte = Normed(nn.Embedding(config.vocab_size, C), UnitRms(C, eps))
  model.lm_head = Normed(llama.LlamaRMSNorm(C, eps), model.lm_head)
  return model


def weights(config, w):
  L = config.num_hidden_layers
  skips = w.get("model.skip_weights", torch.zeros(L // 2))
  renamed = common.renamed(
    w, ("model.norm.", "lm_head.norm."), ("lm_head.weight", "lm_head.inner.weight"), ("model.layers.", "trunk:h."),
    ("input_layernorm", "attn.norm"), ("post_attention_layernorm", "mlp.norm"), ("self_attn.", "attn.inner."),
    ("q_proj", "c_q"), ("k_proj", "c_k"), ("v_proj", "c_v"), ("o_proj", "c_proj"), (".mlp.", ".mlp.inner."),
    (".mlp.inner.norm", ".mlp.norm"), ("embed_tokens.", "trunk:wte.norm." if config.embed_norm else "trunk:wte."),
    ("model.", ""), ("trunk:", "transformer."))
  for i in range(L):
    if (values := renamed.pop("transformer." + f"h.{i}.attn.inner.ve_proj.weight", None)) is not None:
      renamed[f"ve_projs.{i}.weight"] = values
  return {**renamed, "skip_weights": torch.cat([torch.zeros(L % 2), skips])}
