"""LlamaForCausalLM and Qwen3ForCausalLM of the library transformers, as it is installed."""
from . import common

ABOUT = "transformers"
ARCHITECTURES = "llama, also as Qwen3"
CHECKOUTS, PACKAGES = {}, ""  # what Python finds by itself


def load(root):
  global transformers
  import transformers


def models():
  for options in common.crossed(K=(4, 2, 1), tied=(True, False), head_dim=(2, 6), seed=range(4)):
    yield "llama (Llama)", dict(arch="llama", **options)
  for options in common.crossed(K=(4, 2), tied=(True, False), head_dim=(2, 6), seed=range(4)):
    yield "llama, qk_norm (Qwen3)", dict(arch="llama", qk_norm=True, rms_norm_eps=1e-2, qk_norm_eps=1e-2, **options)


def build(config):
  plain = common.llama_config(config)
  if not config.qk_norm:
    return transformers.LlamaForCausalLM(plain)
  keys = {key: value for key, value in plain.to_dict().items() if key not in ("model_type", "architectures")}
  return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**keys))


def weights(config, w):
  return common.renamed(w)
