"""The hyper-connections of DeepSeek-V4, of the library transformers, put around the layers of its LLaMA.

DeepSeek-V4's own attention and experts are not ours; its decoder layer, which writes the streams, is theirs here.
"""
import types

from . import common

ABOUT = "transformers"
ARCHITECTURES = "mhc sinkhorn, reads own"
CHECKOUTS, PACKAGES = {}, ""  # what Python finds by itself


def load(root):
  global deepseek, llama
  from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
  from transformers.models.llama import modeling_llama as llama


def models():
  for options in common.crossed(K=(4, 2), tied=(True, False), hc_mult=(4, 1, 3), seed=range(3)):
    yield "mhc", dict(arch="mhc", **options)
  for options in common.crossed(K=(2,), hc_sinkhorn_iters=(1, 5), hc_eps=(1e-2,), rms_norm_eps=(1e-2,), seed=range(3)):
    yield "mhc, few iterations, large eps", dict(arch="mhc", **options)


def layer_of(plain, config, i):
  class MLP(llama.LlamaMLP):
    def forward(self, x, input_ids=None):
      return super().forward(x)

  class Layer(llama.LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
      return deepseek.DeepseekV4DecoderLayer.forward(self, hidden_states, **kwargs)

  layer = Layer(plain, i)
  layer.mlp = MLP(plain)
  layer.attn_hc, layer.ffn_hc = (deepseek.DeepseekV4HyperConnection(config) for _ in range(2))
  return layer


def build(config):
  plain = common.llama_config(config)
  keys = ("hidden_size", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps")
  theirs = types.SimpleNamespace(**{key: getattr(config, key) for key in keys})
  module = llama.LlamaForCausalLM(plain)
  model = module.model
  for i in range(config.num_hidden_layers):
    model.layers[i] = layer_of(plain, theirs, i)
  model.hc_head = deepseek.DeepseekV4HyperHead(theirs)
  model.layers[0].register_forward_pre_hook(
    lambda _, args: (args[0].unsqueeze(2).expand(-1, -1, config.hc_mult, -1).contiguous(), *args[1:]))
  model.norm.register_forward_pre_hook(lambda _, args: (model.hc_head(args[0]), *args[1:]))
  return module


def weights(config, w):
  return common.renamed(w)
