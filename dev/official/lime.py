"""LIMe with key/value routing and hyper-connections: the newest commit of corl-team/lime."""
import torch

from . import common

ABOUT = "corl-team/lime"
ARCHITECTURES = "lime, hyper"
CHECKOUTS = {"lime": "424281209236fc4e461d3e32160df26245f6ba4c"}
PACKAGES = "transformers-4.51.1"


def load(root):
  global official
  common.use(root / "lime")
  import config
  import src.lm.hc
  import src.lm.lime

  official = {"lime": (src.lm.lime.LIMeForCausalLM, config.LIMeConfig),
              "hyper": (src.lm.hc.LlamaHCForCausalLM, config.HCConfig)}


def models():
  backbones = dict(K=(4, 2), tied=(True, False), head_dim=(2, 6))
  for options in common.crossed(**backbones, seed=range(8)):
    yield "lime", dict(arch="lime", routing="full", **options)
  for options in common.crossed(**backbones, rate=(1, 2, 4), dynamic=(True, False), seed=range(2)):
    yield "hyper", dict(arch="hyper", **options)  # both norms without gains, as the defaults are


def build(config):
  model, options = official[config.arch]
  if config.arch == "lime":
    return model(common.llama_config(config), options())
  return model(common.llama_config(config), options(dynamic=config.dynamic, rate=config.rate))


def weights(config, w):
  state = common.renamed(
    w, ("lime_router.weight", "lime_router.static_weights"), ("attn_hc", "hc_attn"), ("mlp_hc", "hc_mlp"),
    ("alpha_proj", "alpha_fn"), ("beta_proj", "beta_fn"))
  if config.arch == "lime":
    for i in range(config.num_hidden_layers):
      prefix = f"model.layers.{i}.self_attn."
      # Theirs is one matrix, whose rows run over the channels of a key and a value, and for each over the heads.
      both = [state.pop(f"{prefix}{name}_proj.weight").unflatten(0, (-1, config.head_dim)) for name in "kv"]
      state[prefix + "kv_proj_weight"] = torch.cat(both, dim=1).transpose(0, 1).flatten(0, 1)
  return state
