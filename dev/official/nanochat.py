"""nanochat's model, with LLaMA's norms and feed-forward in its blocks: what it adds to the stream and to the values.

Not ours, and taken out: its norms without gains, the factor 1.2 and the norm of queries and keys, the smearing of
embeddings over neighbours, and the cap of logits, which is undone.
"""
import os
import sys
import types

import torch
from torch import nn

from . import common

ABOUT = "karpathy/nanochat"
ARCHITECTURES = "shortcuts"
CHECKOUTS, PACKAGES = {"nanochat": "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd"}, ""


def load(root):
  global gpt, llama
  from transformers.models.llama import modeling_llama as llama

  os.environ["NANOCHAT_DTYPE"] = "float32"
  common.use(root / "nanochat")
  sys.modules["nanochat.optim"] = types.SimpleNamespace(MuonAdamW=None)
  from nanochat import gpt

  gpt.COMPUTE_DTYPE = torch.float64
  gpt.norm = lambda x: x / 1.2 if x.ndim == 4 else x  # of heads, in front of the factor; of streams, where ours are


def models():
  wide = dict(hidden_size=16, head_dim=4, gate_channels=12)
  for options in common.crossed(K=(4, 2, 1), tied=(True, False), embed_norm=(False, True), seed=range(2)):
    yield "shortcuts", dict(arch="shortcuts", **wide, **options)


class Normed(nn.Module):
  def __init__(self, norm, inner):
    super().__init__()
    self.norm, self.inner = norm, inner

  def forward(self, x, *rest):
    return self.inner(self.norm(x), *rest)


class UnitRms(nn.Module):
  def __init__(self, width, eps):
    super().__init__()
    self.shape, self.eps = (width,), eps

  def forward(self, x):
    return torch.nn.functional.rms_norm(x, self.shape, eps=self.eps)


class NoGate(nn.Module):
  def forward(self, x):
    return torch.zeros_like(x[..., :1])


class Uncapped(nn.Module):
  def __init__(self, model):
    super().__init__()
    self.model = model

  def forward(self, tokens):
    return 15 * torch.atanh(self.model(tokens) / 15)


def build(config):
  plain, C, eps = common.llama_config(config), config.hidden_size, config.rms_norm_eps
  model = gpt.GPT(gpt.GPTConfig(
    sequence_len=64, vocab_size=config.vocab_size, n_layer=config.num_hidden_layers, n_head=config.num_attention_heads,
    n_kv_head=config.num_key_value_heads, n_embd=C, window_pattern="L"), pad_vocab_size_to=1)
  model.cos, sin = model._precompute_rotary_embeddings(64, config.head_dim, base=config.rope_theta)
  model.sin = -sin  # they turn the other way
  for block in model.transformer.h:
    block.attn = Normed(llama.LlamaRMSNorm(C, eps), block.attn)
    block.mlp = Normed(llama.LlamaRMSNorm(C, eps), llama.LlamaMLP(plain))
  if config.embed_norm:
    model.transformer.wte = Normed(nn.Embedding(config.vocab_size, C), UnitRms(C, eps))
  model.lm_head = Normed(llama.LlamaRMSNorm(C, eps), model.lm_head)
  model.smear_gate = NoGate()
  return Uncapped(model)


def weights(config, w):
  renamed = common.renamed(
    w, ("model.norm.", "lm_head.norm."), ("lm_head.weight", "lm_head.inner.weight"), ("model.layers.", "trunk:h."),
    ("input_layernorm", "attn.norm"), ("post_attention_layernorm", "mlp.norm"), ("self_attn.", "attn.inner."),
    ("q_proj", "c_q"), ("k_proj", "c_k"), ("v_proj", "c_v"), ("o_proj", "c_proj"), (".mlp.", ".mlp.inner."),
    (".mlp.inner.norm", ".mlp.norm"), ("embed_tokens.", "trunk:wte.norm." if config.embed_norm else "trunk:wte."),
    ("model.", ""), ("trunk:", "transformer."))
  return {f"model.{name}": tensor for name, tensor in {**renamed, "smear_lambda": torch.zeros(1)}.items()}
