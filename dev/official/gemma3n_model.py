"""Gemma 3n's model, of the library transformers: embeddings of layers and LAuReL around its own attention.

Not ours, and taken out: AltUp, of whose streams one remains; the norms of sublayers' outputs and of values, and without
qk_norm those of queries and keys; attention without the root of the width; GELU and sparsity in the feed-forward part,
which is LLaMA's then; and the cap of logits.
"""
import torch
from torch import nn

from . import common

ABOUT = "transformers"
ARCHITECTURES = "gemma3n, gemma3n+kv_share"
CHECKOUTS, PACKAGES = {}, ""  # what Python finds by itself


def load(root):
  global transformers
  import transformers


def models():
  small = dict(arch="gemma3n", laurel_rank=3)
  for options in common.crossed(K=(4, 2), tied=(True, False), hidden_size_per_layer_input=(6, 1),
                                embed_scale=("sqrt", "none"), seed=range(2)):
    yield "gemma3n", dict(**small, **options)
  for options in common.crossed(K=(4, 1), tied=(True, False), hidden_size_per_layer_input=(5,), qk_norm=(True, False),
                                seed=range(2)):
    yield "gemma3n, large eps", dict(**small, rms_norm_eps=1e-2, qk_norm_eps=1e-2, head_dim=6, **options)
  for options in common.crossed(K=(4, 2), tied=(True, False), laurel_rank=(1, 5), seed=range(2)):
    yield "gemma3n, LAuReL alone", dict(arch="gemma3n", hidden_size_per_layer_input=0, **options)
  for options in common.crossed(K=(4, 2), tied=(True, False), num_kv_shared_layers=(1, 2), qk_norm=(True, False),
                                seed=range(2)):
    yield "gemma3n+kv_share", dict(arch="gemma3n+kv_share", sharing="suffix", laurel_rank=3, rms_norm_eps=1e-2,
                                   qk_norm_eps=1e-2, hidden_size_per_layer_input=5, **options)


class OneStream(nn.Module):
  """In the place of AltUp: nothing is predicted, and the last stream, which alone takes a layer's embedding, is all."""

  def predict(self, streams):
    return streams[-1:].expand_as(streams)

  def correct(self, predictions, x):
    return x.repeat(len(predictions), 1, 1, 1)


def build(config):
  keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "laurel_rank",
          "hidden_size_per_layer_input")
  L = config.num_hidden_layers
  module = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(
    **{key: getattr(config, key) for key in keys}, vocab_size_per_layer_input=config.vocab_size, altup_num_inputs=2,
    altup_correct_scale=False, num_kv_shared_layers=getattr(config, "num_kv_shared_layers", 0),
    layer_types=["full_attention"] * L,
    activation_sparsity_pattern=[0.0] * L, use_cache=False, pad_token_id=None,
    rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": config.rope_theta}}))
  vars(module.config)["final_logit_softcapping"] = None  # which their configuration refuses
  model = module.model
  if config.embed_scale == "none":
    model.embed_tokens.embed_scale.fill_(1)
  for layer in model.layers:
    layer.altup, layer.mlp.act_fn = OneStream(), nn.SiLU()
    layer.post_attention_layernorm = layer.post_feedforward_layernorm = nn.Identity()
    layer.self_attn.v_norm, layer.self_attn.scaling = nn.Identity(), config.head_dim**-0.5
    if not config.qk_norm:
      layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
  model.layers[-1].register_forward_hook(lambda _, __, streams: streams[-1:].expand_as(streams))
  model.altup_projections[0] = model.altup_unembed_projections[0] = nn.Identity()
  return module


def weights(config, w):
  """Without embeddings of layers theirs have width 0, and norms that take nothing in."""
  out = common.renamed(w, ("post_attention_layernorm", "pre_feedforward_layernorm"))
  if config.hidden_size_per_layer_input == 0:
    C = config.hidden_size
    out.update({"model.embed_tokens_per_layer.weight": torch.zeros(config.vocab_size, 0),
                "model.per_layer_model_projection.weight": torch.zeros(0, C),
                "model.per_layer_projection_norm.weight": torch.zeros(0)})
    for i in range(config.num_hidden_layers):
      out.update({f"model.layers.{i}.per_layer_input_gate.weight": torch.zeros(0, C),
                  f"model.layers.{i}.per_layer_projection.weight": torch.zeros(C, 0),
                  f"model.layers.{i}.post_per_layer_input_norm.weight": torch.zeros(C)})
  return out
