"""The gated residual streams of Qwen's next model, of the library transformers, put around the layers of its LLaMA.

Their embeddings by n-grams are Engram without its convolution, which adds nothing here for its weights are 0. Qwen's
attention and experts are not ours; its decoder layer, which writes the streams, is theirs here.
"""
import types

import torch

from . import common

ABOUT = "transformers"
ARCHITECTURES = "gated_streams, with Engram"
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
  for options in common.crossed(hc_count=(4, 1), hc_lowrank=(3,), engram_layers=([1], [0, 1]), engram_order=(3, 2),
                                engram_seed=(0, 5), seed=range(2)):
    yield "gated_streams, Engram", dict(arch="gated_streams", engram_heads=2, engram_rows=9, engram_boundary=[3],
                                        engram_pad_id=3, **options)


def layer_of(plain, config, i):
  class Layer(llama.LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
      return qwen.Qwen4ExpTextDecoderLayer.forward(self, hidden_states, ple_input_ids=self.tokens, **kwargs)

  layer = Layer(plain, i)
  del layer.input_layernorm, layer.post_attention_layernorm
  layer.ple, layer.layer_type, layer.tokens = None, "full_attention", None
  if i in config.engram_layers:
    layer.ple = qwen.Qwen4ExpTextPLELayer(config, i, config.engram_layers.index(i))
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
                                 rms_norm_eps=config.rms_norm_eps, vocab_size=config.vocab_size,
                                 engram_layers=list(config.engram_layers), ple_embed_dim=config.hidden_size,
                                 ngram_size=config.engram_order, heads_per_ngram=config.engram_heads,
                                 ngram_vocab_size_base=config.engram_rows, seed=config.engram_seed, eos_token_id=3,
                                 make_ngram_vocab_size_divisible_by=1, ple_conv_kernel_size=4)
  module = llama.LlamaForCausalLM(plain)
  model = module.model
  for i in range(config.num_hidden_layers):
    model.layers[i] = layer_of(plain, theirs, i)
  model.hyper_connection_mixer = qwen.Qwen4ExpTextGatedResidual(theirs, use_combine=False)
  model.norm = LastRead(model.hyper_connection_mixer)
  model.layers[0].register_forward_pre_hook(lambda _, args: (args[0].repeat(1, 1, config.hc_count), *args[1:]))
  module.register_forward_pre_hook(tell_tokens)
  return module


def tell_tokens(module, args):
  for layer in module.model.layers:
    layer.tokens = args[0]


def weights(config, w):
  """Theirs keep keys and value apart, gains less 1, and have a convolution."""
  out = {}
  for name, tensor in common.renamed(w).items():
    layer, engram, rest = name.partition(".engram.")
    if not engram:
      out[name] = tensor
    elif rest == "embed.weight":
      out[f"{layer}.ple.ple_embedding.ngram_embedding.weight"] = tensor
    elif rest == "wkv.weight":
      width = config.hidden_size
      out[f"{layer}.ple.key_proj.weight"], out[f"{layer}.ple.value_proj.weight"] = tensor[:-width], tensor[-width:]
    else:
      norm = {"q_weight": "norm_query", "k_weight": "norm_key"}[rest]
      out[f"{layer}.ple.{norm}.weight"] = tensor.flatten() - 1
      out[f"{layer}.ple.norm_conv.weight"] = torch.zeros(tensor.numel())
      out[f"{layer}.ple.conv1d.weight"] = torch.zeros(tensor.numel(), 1, 4)
  return out
