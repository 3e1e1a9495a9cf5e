"""The gated residual streams of Qwen's next model, of the library transformers, put around the layers of its LLaMA.

Qwen's attention, experts and embeddings by n-grams are not ours; its decoder layer, which writes the streams, is theirs
here.
"""
import types

import torch

from . import common

ABOUT = "transformers"
ARCHITECTURES = "gated_streams"
CHECKOUTS, PACKAGES = {}, ""  # what Python finds by itself


def load(root):
  global qwen, llama
  from transformers.models.llama import modeling_llama as llama
  from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen


def models():
  for options in common.crossed(K=(4, 2), tied=(True, False), hc_count=(4, 1, 3), hc_lowrank=(3, 1), seed=range(2)):
    yield "gated_streams", dict(arch="gated_streams", **options)
  for options in common.crossed(K=(2,), rms_norm_eps=(1e-2,), hc_lowrank=(5,), seed=range(3)):
    yield "gated_streams, large eps", dict(arch="gated_streams", **options)


def layer_of(plain, config, i):
  class Layer(llama.LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
      return qwen.Qwen4ExpTextDecoderLayer.forward(self, hidden_states, **kwargs)

  layer = Layer(plain, i)
  del layer.input_layernorm, layer.post_attention_layernorm
  layer.ple, layer.layer_type = None, "full_attention"
  layer.attn_hyper_connection, layer.mlp_hyper_connection = (qwen.Qwen4ExpTextGatedResidual(config) for _ in range(2))
  return layer


class LastRead(torch.nn.Module):
  """In the place of LLaMA's norm: what the head sees."""

  def __init__(self, mixer):
    super().__init__()
    self.mixer = [mixer]  # its parameters are the model's

  def forward(self, streams):
    return self.mixer[0](streams)


def build(config):
  plain = common.llama_config(config)
  theirs = types.SimpleNamespace(hidden_size=config.hidden_size, hc_count=config.hc_count, hc_lowrank=config.hc_lowrank,
                                 rms_norm_eps=config.rms_norm_eps)
  module = llama.LlamaForCausalLM(plain)
  model = module.model
  for i in range(config.num_hidden_layers):
    model.layers[i] = layer_of(plain, theirs, i)
  model.hyper_connection_mixer = qwen.Qwen4ExpTextGatedResidual(theirs, use_combine=False)
  model.norm = LastRead(model.hyper_connection_mixer)
  model.layers[0].register_forward_pre_hook(lambda _, args: (args[0].repeat(1, 1, config.hc_count), *args[1:]))
  return module


def weights(config, w):
  return common.renamed(w)
