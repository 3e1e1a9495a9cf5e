"""MUDDFormer: Caiyun-AI/MUDDFormer, its PyTorch code, which has no norms around the mixing (our norm none).

It does not repeat key/value heads for grouped queries, so that only K = H and K = 1 run. Its first layer has one
attention norm where we have three, for queries, keys and values: ours are put into its projections. Its feed-forward
widths are multiples of 128 that grow with the layer; other widths are those of its class FeedForward without that rule.
"""
import torch

from . import common

ABOUT = "Caiyun-AI/MUDDFormer"
ARCHITECTURES = "mudd"
CHECKOUTS = {"MUDDFormer": "fc067b274a5f14894b2ee299fdcb3c581a092896"}
PACKAGES = "transformers-4.51.1"
BASE, WIDTHS = 256, [128, 256, 256, 384]  # their rule makes the widths out of the base


def load(root):
  global FeedForward, MUDDFormer, MUDDFormerConfig
  common.use(root / "MUDDFormer" / "pytorch" / "muddformer")
  from configuration_muddformer import MUDDFormerConfig
  from modeling_muddformer import FeedForward, MUDDFormer


def models():
  for options in common.crossed(
      K=(4, 1), tied=(True, False), qk_norm=(False, True), rms_norm_eps=(1e-6, 1e-3), seed=range(3)):
    options["qk_norm_eps"] = options["rms_norm_eps"]
    yield "mudd, norm none", dict(arch="mudd", norm="none", **options)
  for options in common.crossed(K=(4, 1), tied=(True, False), seed=range(4)):
    yield "mudd, norm none, their widths", dict(
      arch="mudd", norm="none", num_hidden_layers=len(WIDTHS), intermediate_sizes=WIDTHS, rms_norm_eps=1e-6, **options)


def build(config):
  theirs = MUDDFormerConfig(
    block_size=64, vocab_size=config.vocab_size, n_layer=config.num_hidden_layers, n_head=config.num_attention_heads,
    dim=config.hidden_size, intermediate_size=BASE if config.intermediate_sizes else config.intermediate_size,
    n_local_heads=config.num_key_value_heads, head_dim=config.head_dim, rope_base=config.rope_theta,
    norm_eps=config.rms_norm_eps, is_training=True, use_qk_norm=config.qk_norm)
  module = MUDDFormer(theirs)
  for i, layer in enumerate(module.layers if not config.intermediate_sizes else ()):
    layer.feed_forward = FeedForward(theirs, i, round128=False, scale_with_layer=False)
  module.setup_caches(2, 8)
  return module


def weights(config, w):
  state = common.renamed(
    w, ("model.embed_tokens", "tok_embeddings"), ("model.", ""), ("lm_head", "output"),
    ("self_attn.q_norm", "attention.q_norm"), ("self_attn.k_norm", "attention.k_norm"),
    *((f"self_attn.{name}_proj", f"attention.w{name}") for name in "qkvo"),
    ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
    ("post_attention_layernorm", "ffn_norm"),
    *((f"input_layernorm_{name}", f"attention_norms.{i}") for i, name in enumerate("qkv")))
  for i in range(config.num_hidden_layers):
    state[f"dense_bs.{i}"] = state.pop(f"layers.{i}.da.static_weight")
    for name in ("w1", "w2"):
      state[f"dynamic_dense.{i}.{name}.weight"] = state.pop(f"layers.{i}.da.{name}.weight")
  for i, name in enumerate("qkv"):
    gain = state.pop(f"layers.0.attention_norms.{i}.weight")
    state[f"layers.0.attention.w{name}.weight"] = state[f"layers.0.attention.w{name}.weight"] * gain
  state["layers.0.attention_norm.weight"] = torch.ones(config.hidden_size)
  return state
