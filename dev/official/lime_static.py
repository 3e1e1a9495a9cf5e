"""LIMe version 1, static and dynamic: an earlier commit of corl-team/lime. There K = H.

The pruned weights of its static router are a buffer that only update_mask refreshes; here that happens before each
forward, or the router would have no gradient.
"""
from . import common

ABOUT = "corl-team/lime, version 1"
ARCHITECTURES = "lime_static, lime_dynamic"
CHECKOUTS = {"lime-v1": "601cd30cf662ec836115000fc1bde0dba1a8c2b7"}
PACKAGES = "transformers-4.45.2"


def load(root):
  global LIMeForCausalLM, LIMeConfig
  common.use(root / "lime-v1")
  from config import LIMeConfig
  from src.lm.lime import LIMeForCausalLM


def models():
  backbones = dict(K=(4,), tied=(True, False), head_dim=(2, 6), seed=range(8))
  for options in common.crossed(**backbones):
    yield "lime_static", dict(arch="lime_static", **options)
    yield "lime_dynamic", dict(arch="lime_dynamic", **options)
  for options in common.crossed(**backbones, top_p=(0.5, 0.7)):
    yield "lime_static, top_p", dict(arch="lime_static", **options)


def build(config):
  dynamic = config.arch == "lime_dynamic"
  top_p = config.top_p if not dynamic and config.top_p < 1 else None
  module = LIMeForCausalLM(common.llama_config(config), LIMeConfig(dynamic=dynamic, top_p=top_p))
  if top_p is not None:
    for layer in module.model.layers[1:]:
      layer.attention_router.register_forward_pre_hook(lambda router, _: router.update_mask())
  return module


def weights(config, w):
  state = common.renamed(
    w, ("self_attn.lime_router.weight", "attention_router.static_weights"),
    ("self_attn.lime_router.proj.weight", "attention_router.dynamic_proj.0.weight"),
    ("lime_layernorm", "input_layernorm_lime"))
  for i in range(1, config.num_hidden_layers):
    prefix = f"model.layers.{i}.self_attn."
    state[prefix + "q_proj_default.weight"] = state.pop(prefix + "q_proj.weight")
    for name in "kv":
      rows = state.pop(f"{prefix}{name}_proj.weight").unflatten(0, (-1, config.head_dim))
      state[f"{prefix}{name}_proj_lime.lime_kv_proj"] = rows.transpose(1, 2)[None]
  return state
