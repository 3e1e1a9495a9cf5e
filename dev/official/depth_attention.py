"""Depth-Attention's model, with the attention that calls PyTorch's scaled_dot_product_attention.

Not ours, and taken out: keys are normed behind their rotation there, with a gain of each channel; ours are normed in
front of it, here behind the product that makes them. The rotary table is that of transformers.
"""
import math
import types
import typing

from torch import nn

from . import common

ABOUT = "hyq718/Depth-Attention"
ARCHITECTURES = "depth_attention"
CHECKOUTS, PACKAGES = {"Depth-Attention": "3bdad7082c7e63884c030b83d9d3ada3f63dad6d"}, ""
PARTS = ("_depth_softmax_split_mix", "_depth_softmax_stream_mix", "_get_compiled_depth_mix", "rotate_half",
         "apply_rotary_pos_emb", "repeat_kv", "LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "LlamaSdpaAttention",
         "LlamaDecoderLayer", "LlamaModel")


class PreTrained(nn.Module):
  """In the place of transformers' PreTrainedModel, of another version."""

  def __init__(self, config):
    super().__init__()
    self.config = config

  def post_init(self):
    pass


def undocumented(*_):
  return lambda part: part


def load(root):
  global llama, theirs
  from transformers.models.llama import modeling_llama as llama

  theirs = common.parts_of_script(
    root / "Depth-Attention/src/llamafactory/model/modeling/modeling_llama_depth_attention.py", PARTS,
    **{name: getattr(typing, name) for name in ("List", "Optional", "Tuple", "Union")}, math=math,
    LlamaConfig=object, Cache=types.SimpleNamespace, BaseModelOutputWithPast=types.SimpleNamespace,
    LlamaPreTrainedModel=PreTrained, ACT2FN={"silu": nn.functional.silu},
    LlamaRotaryEmbedding=lambda config: llama.LlamaRotaryEmbedding(config.plain), LLAMA_START_DOCSTRING="",
    LLAMA_INPUTS_DOCSTRING="", add_start_docstrings=undocumented, add_start_docstrings_to_model_forward=undocumented,
    _DEPTH_MIX_COMPILE_ENABLED=False, _DEPTH_MIX_IMPL="split")
  theirs.LLAMA_ATTENTION_CLASSES = {"sdpa": theirs.LlamaSdpaAttention}


def models():
  sources = [dict(depth_stride=stride, depth_recent=recent) for stride, recent in ((0, 0), (1, 0), (3, 1), (2, 2))]
  for source in sources:
    for options in common.crossed(K=(4, 2, 1), tied=(True, False), seed=range(2)):
      yield "depth_attention", dict(arch="depth_attention", **source, **options)
  for source in sources[:2]:
    for options in common.crossed(K=(4, 2), tied=(True, False), head_dim=(2, 6), seed=range(2)):
      yield "depth_attention, qk_norm", dict(arch="depth_attention", qk_norm=True, rms_norm_eps=1e-2, qk_norm_eps=1e-2,
                                             **source, **options)


class HeadNorm(nn.Module):
  def __init__(self, width, eps):
    super().__init__()
    self.norm, self.width = llama.LlamaRMSNorm(width, eps), width

  def forward(self, x):
    return self.norm(x.unflatten(-1, (-1, self.width))).flatten(-2)


class CausalLM(nn.Module):
  def __init__(self, model, head):
    super().__init__()
    self.model, self.lm_head = model, head

  def forward(self, tokens):
    return self.lm_head(self.model(tokens).last_hidden_state)


def build(config):
  keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
  model = theirs.LlamaModel(types.SimpleNamespace(
    **{key: getattr(config, key) for key in keys}, plain=common.llama_config(config), use_qk_norm=config.qk_norm,
    recurrent_model=True, use_depth_attention=True, depth_attention_recent_window=config.depth_recent,
    depth_attention_stride=config.depth_stride or max(1, config.num_hidden_layers // 2), _attn_implementation="sdpa",
    attention_dropout=0.0, attention_bias=False, mlp_bias=False, hidden_act="silu", pretraining_tp=1, pad_token_id=None,
    max_position_embeddings=64, use_cache=False, output_attentions=False, output_hidden_states=False,
    use_return_dict=True))
  model._update_causal_mask = lambda *_: None  # all see all before them
  model.has_printed_debug = True
  for layer in model.layers if config.qk_norm else ():
    attention = layer.self_attn
    attention.k_norm = nn.Identity()
    attention.k_proj = nn.Sequential(attention.k_proj, HeadNorm(config.head_dim, config.qk_norm_eps))
  return CausalLM(model, nn.Linear(config.hidden_size, config.vocab_size, bias=False))


def weights(config, w):
  return common.renamed(w, *((("k_proj", "k_proj.0"), ("k_norm", "k_proj.1.norm")) if config.qk_norm else ()))
