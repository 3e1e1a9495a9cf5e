"""DenseFormer: the package of epfml/DenseFormer, put around the layers of transformers' LLaMA as its page says.

The authors' experiments use GPT-2's blocks, which are not ours; their weighted averages are this package.
"""
from . import common

ABOUT = "epfml/DenseFormer"
ARCHITECTURES = "denseformer"
CHECKOUTS = {"DenseFormer": "c99a623bdb5f6611bf0d37e964c67ecbf15c3c19"}
PACKAGES = "transformers-4.51.1"


def load(root):
  global DWAModules, LlamaForCausalLM
  common.use(root / "DenseFormer")
  from denseformer import DWAModules
  from transformers import LlamaForCausalLM


def models():
  for options in common.crossed(K=(4, 2), tied=(True, False), dilation=(1, 2, 3), period=(1, 2, 3), seed=range(2)):
    yield "denseformer", dict(arch="denseformer", **options)


def build(config):
  module = LlamaForCausalLM(common.llama_config(config))
  dwa = module.model.dwa_modules = DWAModules(config.num_hidden_layers, config.dilation, config.period)
  module.model.embed_tokens.register_forward_hook(lambda _, args, out: dwa.init_accumulators(out))
  for i, layer in enumerate(module.model.layers):
    layer.register_forward_hook(lambda _, args, out, i=i: (dwa(out[0], block_idx=i), *out[1:]))
  return module


def weights(config, w):
  return common.renamed(w)
