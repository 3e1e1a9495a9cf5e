"""The attention of Gemma 3n, of the library transformers, in the layers of its LLaMA: who shares keys and values.

Two things of it are not ours and are taken out: values pass a norm without a gain there, and scores are not divided by
the root of the width.
"""
from torch import nn

from . import common

ABOUT = "transformers"
ARCHITECTURES = "kv_share suffix, with qk_norm"
CHECKOUTS, PACKAGES = {}, ""  # what Python finds by itself


def load(root):
  global gemma, Gemma3nTextConfig, llama
  from transformers import Gemma3nTextConfig
  from transformers.models.gemma3n import modeling_gemma3n as gemma
  from transformers.models.llama import modeling_llama as llama


def models():
  for options in common.crossed(K=(4, 2, 1), tied=(True, False), num_kv_shared_layers=(1, 2, 3), seed=range(2)):
    yield "kv_share", dict(arch="kv_share", sharing="suffix", qk_norm=True, rms_norm_eps=1e-2, qk_norm_eps=1e-2,
                           num_hidden_layers=5, **options)


def build(config):
  plain = common.llama_config(config)
  keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
          "num_kv_shared_layers")
  theirs = Gemma3nTextConfig(**{key: getattr(config, key) for key in keys},
                             layer_types=["full_attention"] * config.num_hidden_layers)
  plain._attn_implementation = theirs._attn_implementation = "eager"  # which is given the mask
  module = llama.LlamaForCausalLM(plain)
  shared = {}
  for i, layer in enumerate(module.model.layers):
    layer.self_attn = gemma.Gemma3nTextAttention(theirs, i)
    layer.self_attn.scaling = config.head_dim**-0.5
    layer.self_attn.v_norm = nn.Identity()
    layer.self_attn.register_forward_pre_hook(
      lambda _, args, kwargs: (args, {**kwargs, "shared_kv_states": shared}), with_kwargs=True)
  return module


def weights(config, w):
  return common.renamed(w)
