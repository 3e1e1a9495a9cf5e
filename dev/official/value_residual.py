"""ResFormer: Zcchill/Value-Residual-Learning, its LLaMA, ResFormer (our variant identity) and SVFormer."""
from . import common

ABOUT = "Zcchill/Value-Residual-Learning"
ARCHITECTURES = "resformer, llama"
CHECKOUTS = {"Value-Residual-Learning": "95652f64aba7db6c095f4e92eafb9e76e6ed9e02"}
PACKAGES = "transformers-4.45.2"


def load(root):
  global official
  common.use(root / "Value-Residual-Learning" / "src" / "modeling")
  import modeling_llama_baseline
  import modeling_llama_resformer
  import modeling_llama_svformer

  official = {"": modeling_llama_baseline, "identity": modeling_llama_resformer, "svformer": modeling_llama_svformer}


def models():
  for options in common.crossed(K=(4, 2), tied=(True, False), head_dim=(2,), seed=range(8)):
    yield "llama", dict(arch="llama", **options)
    for variant in ("identity", "svformer"):
      yield f"resformer {variant}", dict(arch="resformer", variant=variant, **options)


def build(config):
  theirs = common.llama_config(config)
  theirs._attn_implementation = "eager"  # the only one on a CPU that mixes values
  return official[getattr(config, "variant", "")].LlamaForCausalLM(theirs)


def weights(config, w):
  return common.renamed(w)
