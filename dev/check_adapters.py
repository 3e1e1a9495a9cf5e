#!/usr/bin/env python3
"""Calls every adapter of dev/official once for each of its rows, with small stand-ins for the official code.

dev/compare_official.py needs checkouts that few machines have. This needs none: it finds an adapter that no longer fits
dev/reference, whose functions, classes and names it uses. It says nothing about the official code.

Each adapter must accept our weights and use all of them, and build a model that runs. The parts of official code that
dev/official/satformer.py replaces must give the values of dev/reference. Each adapter runs in a process of its own.

Exit 0: all run. 1: one does not. 77: skipped, PyTorch is not importable.
"""
import importlib
import os
import pathlib
import sys
import tempfile
import traceback
import types

try:
  import torch
except ImportError:
  print("skipped: PyTorch is not importable")
  sys.exit(77)
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from compare_official import NAMES  # noqa: E402
from official import common  # noqa: E402
from reference import llama, model_dir  # noqa: E402

TOKENS = torch.arange(10).reshape(2, 5) % 7  # (B, T)


class Options:
  """Stands for a configuration class: keeps what it is given."""

  def __init__(self, **options):
    vars(self).update(options)

  def to_dict(self):
    return dict(vars(self))


class Same(nn.Module):
  """Stands for a module of which only the calls matter: gives back its first argument."""

  def __init__(self, *_, **__):
    super().__init__()

  def forward(self, x=None, *_, hidden_states=None, **__):
    return hidden_states if x is None else x


class Layer(Same):
  """Stands for a layer of LLaMA; `answer` is what a version of transformers returns."""
  answer = staticmethod(lambda x: x)

  def __init__(self, *_, **__):
    super().__init__()
    self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm, self.attention_router = (
      Same() for _ in range(5))
    self.attention_router.update_mask = lambda: None

  def forward(self, hidden_states, **kwargs):
    self.attention_router(hidden_states)
    self.self_attn(hidden_states=hidden_states)
    return self.answer(self.mlp(hidden_states))


class Model(nn.Module):
  """Stands for LlamaForCausalLM and for what inherits from it."""
  layer = Layer

  def __init__(self, config, *_):
    super().__init__()
    self.model = nn.Module()
    self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    self.model.layers = nn.ModuleList(self.layer() for _ in range(config.num_hidden_layers))
    self.model.norm = Same()
    self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

  def forward(self, tokens):
    x = self.model.embed_tokens(tokens)
    for layer in self.model.layers:
      x = layer(x)
      x = x[0] if isinstance(x, tuple) else x
    return self.lm_head(self.model.norm(x))


class InTuple(Layer):
  answer = staticmethod(lambda x: (x,))


class OfTuples(Model):
  layer = InTuple


class Gemma(Model):
  """Stands for Gemma3nForCausalLM."""

  def __init__(self, config):
    super().__init__(config)
    self.config = config
    self.model.embed_tokens.register_buffer("embed_scale", torch.ones(()))
    self.model.altup_projections, self.model.altup_unembed_projections = ([None] for _ in range(2))


class FirstStream(Same):
  """Stands for what reads several streams (B, T, n, C), or side by side (B, T, n*C): takes the first."""

  def __init__(self, config, use_combine=True):
    super().__init__()
    self.width = config.hidden_size

  def forward(self, x):
    return x[:, :, 0] if x.ndim == 4 else x[..., : self.width]


class Average(Same):
  """Stands for DenseFormer's DWAModules."""

  def init_accumulators(self, x):
    self.shape = x.shape

  def forward(self, x, block_idx):
    assert x.shape == self.shape and block_idx >= 0
    return x


class Mudd(nn.Module):
  def __init__(self, config):
    super().__init__()
    self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
    self.layers = nn.ModuleList(nn.Module() for _ in range(config.n_layer))
    self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

  def setup_caches(self, batch, length):
    self.largest = batch, length

  def forward(self, tokens):
    assert all(size <= most for size, most in zip(tokens.shape, self.largest))
    return self.output(self.tok_embeddings(tokens))


class Gpt(nn.Module):
  """Stands for nanochat's GPT."""

  def __init__(self, config, pad_vocab_size_to):
    super().__init__()
    self.transformer = nn.Module()
    self.transformer.wte = nn.Embedding(config.vocab_size, config.n_embd)
    self.transformer.h = nn.ModuleList(nn.ModuleDict(dict(attn=Same(), mlp=Same())) for _ in range(config.n_layer))
    self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

  def _precompute_rotary_embeddings(self, length, width, base):
    return torch.zeros(length, width), torch.zeros(length, width)

  def forward(self, tokens):
    x = self.transformer.wte(tokens)
    for block in self.transformer.h:
      x = block.mlp(block.attn(x, self.cos, self.sin))
    return 15 * torch.tanh(self.lm_head(x) + self.smear_gate(x).sum()).div(15)


class LoopedGpt(Gpt):
  """Stands for QLabs' TransformerGPT."""

  def __init__(self, config, pad_vocab_size_to):
    passes = 1 if config.depth_scale_mode == "loop" else config.core_repetitions
    config.n_layer += (passes - 1) * config.core_layer_count
    super().__init__(config, pad_vocab_size_to)

  def _precompute_rotary(self, length, width, base):
    return self._precompute_rotary_embeddings(length, width, base)

  def forward(self, tokens):
    x = self.transformer.wte(tokens)
    for block in self.transformer.h:
      x = block.mlp(block.attn(x, (self.cos, self.sin), None))
    return self.lm_head(x)


class SlowrunGpt(Gpt):
  """Stands for slowrun's GPT."""

  def __init__(self, config, pad_vocab_size_to):
    super().__init__(config, pad_vocab_size_to)
    for block in self.transformer.h:
      block.attn.attn_gate, block.attn.ve_gate = Same(), Same()

  _precompute_rotary = Gpt._precompute_rotary_embeddings

  def forward(self, tokens):
    x = self.transformer.wte(tokens)
    for block in self.transformer.h:
      x = block.mlp(block.attn(x, None, (self.cos, self.sin), None))
    return self.lm_head(x)


class ModdedGpt:
  """Stands for modded-nanogpt's GPT: its methods alone are called, with another `self`."""

  def forward(self, tokens, *_):
    x = self.embed(tokens)[None]
    for place, block in zip(self.mlp_bank[:, 0], self.blocks, strict=True):
      x = block.mlp(x, place)
    self.lm_head(x)

  def forward_mudd(self, x):
    return x


class DepthModel(nn.Module):
  """Stands for Depth-Attention's LlamaModel."""

  def __init__(self, config):
    super().__init__()
    self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    self.layers = nn.ModuleList(Layer() for _ in range(config.num_hidden_layers))
    for layer in self.layers:
      layer.self_attn.k_proj = Same()

  def forward(self, tokens):
    x = self.embed_tokens(tokens)
    for layer in self.layers:
      x = layer(x)
    return types.SimpleNamespace(last_hidden_state=x)


class FlaAttention(nn.Module):
  """A LLaMA's attention out of the parts that dev/official/satformer.py puts in the place of fla and flash_attn."""

  def __init__(self, config):
    super().__init__()
    fla, C, D = sys.modules["fla.modules"], config.hidden_size, head_width(config)
    self.width, self.qk_norm = D, config.qk_norm
    self.q_proj, self.o_proj = nn.Linear(C, config.num_heads * D, False), nn.Linear(config.num_heads * D, C, False)
    self.k_proj, self.v_proj = (nn.Linear(C, config.num_kv_heads * D, False) for _ in range(2))
    if config.qk_norm:
      self.q_norm, self.k_norm = fla.RMSNorm(D), fla.RMSNorm(D)
    self.rotary = fla.RotaryEmbedding(D, config.rope_theta)

  def forward(self, x):
    q, k, v = (proj(x).unflatten(-1, (-1, self.width)) for proj in (self.q_proj, self.k_proj, self.v_proj))
    if self.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    q, k = self.rotary(q, k)
    attend = sys.modules["flash_attn"].flash_attn_func
    return self.o_proj(attend(q, k, v, causal=True, window_size=(-1, -1)).flatten(2))


def head_width(config):
  """The width of a head."""
  return config.hidden_size // config.num_heads


class FlaModel(nn.Module):
  """Stands for each of SATFormer's models: a plain LLaMA of the same parts, under their names."""

  def __init__(self, config):
    super().__init__()
    fla, C = sys.modules["fla.modules"], config.hidden_size
    self.model = nn.Module()
    self.model.embeddings = nn.Embedding(config.vocab_size, C)
    self.model.layers = nn.ModuleList(nn.ModuleDict(dict(
      attn_norm=fla.RMSNorm(C, eps=config.norm_eps), attn=FlaAttention(config),
      mlp_norm=fla.RMSNorm(C, eps=config.norm_eps), mlp=fla.GatedMLP(C, config.intermediate_size)))
      for _ in range(config.num_hidden_layers))
    self.model.norm = fla.RMSNorm(C, eps=config.norm_eps)
    self.lm_head = nn.Linear(C, config.vocab_size, bias=False)

  def forward(self, tokens):
    x = self.model.embeddings(tokens)
    for layer in self.model.layers:
      x = x + layer["attn"](layer["attn_norm"](x))
      x = x + layer["mlp"](layer["mlp_norm"](x))
    return self.lm_head(self.model.norm(x))


def stand_in(name, **members):
  """A module of this name, with the packages above it."""
  parts = name.split(".")
  for i in range(1, len(parts) + 1):
    path = ".".join(parts[:i])
    if path not in sys.modules:
      sys.modules[path] = types.ModuleType(path)
      sys.modules[path].__path__ = []
      if i > 1:
        setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[path])
  vars(sys.modules[name]).update(members)


def stand_in_for_transformers(model):
  stand_in("transformers", LlamaConfig=Options, Qwen3Config=Options, Gemma3nTextConfig=Options, LlamaForCausalLM=model,
           Qwen3ForCausalLM=model, Gemma3nForCausalLM=Gemma, AttentionInterface=types.SimpleNamespace(register=Same()))
  stand_in("transformers.models.llama.modeling_llama", LlamaForCausalLM=model, LlamaMLP=Same, LlamaRMSNorm=Same,
           LlamaDecoderLayer=Layer, apply_rotary_pos_emb=lambda q, k, *_: (q, k))
  stand_in("transformers.models.deepseek_v4.modeling_deepseek_v4", DeepseekV4DecoderLayer=Layer,
           DeepseekV4HyperConnection=FirstStream, DeepseekV4HyperHead=FirstStream)
  stand_in("transformers.models.gemma3n.modeling_gemma3n", Gemma3nTextAttention=Same)
  stand_in("transformers.models.qwen4_exp.modeling_qwen4_exp", Qwen4ExpTextDecoderLayer=Layer,
           Qwen4ExpTextGatedResidual=FirstStream, Qwen4ExpTextPLELayer=Same)


def stand_in_for_checkouts(name):
  stand_in("config", LIMeConfig=Options, HCConfig=Options)
  stand_in("src.lm.hc", LlamaHCForCausalLM=Model)
  stand_in("src.lm.lime", LIMeForCausalLM=Model)
  stand_in("denseformer", DWAModules=Average)
  for file in ("baseline", "resformer", "svformer"):
    stand_in(f"modeling_llama_{file}", LlamaForCausalLM=Model)
  stand_in("configuration_muddformer", MUDDFormerConfig=Options)
  stand_in("modeling_muddformer", MUDDFormer=Mudd, FeedForward=Same)
  stand_in("nanochat.gpt", GPT=Gpt, GPTConfig=Options)
  stand_in("models.config", GPTConfig=Options)
  stand_in("models.layers")
  stand_in("models.transformer", TransformerGPT=LoopedGpt)
  stand_in("engram", make_offsets=Same(), engram_gate_ref=lambda streams, *_: streams,
           engram_hash_ref=lambda grams, _, sizes, __: torch.zeros(1, len(grams), sizes.numel(), dtype=torch.long))
  scripts = {"slowrun": dict(GPT=SlowrunGpt, GPTConfig=Options), "modded_nanogpt": dict(GPT=ModdedGpt),
             "depth_attention": dict(LlamaModel=DepthModel, LlamaSdpaAttention=Same),
             "moda": dict(naive_mixture_of_depth_causal_ref=None)}
  common.parts_of_script = lambda *_, **__: types.SimpleNamespace(**scripts[name])
  if name == "satformer":
    stand_in("models.resformer.attn_resformer")
    for package, stem in importlib.import_module("official.satformer").THEIRS.values():
      stand_in(f"models.{package}.configuration_{package}", **{f"{stem}Config": Options})
      stand_in(f"models.{package}.modeling_{package}", **{f"{stem}ForCausalLM": FlaModel})


def check_weights(adapter, config, arrays):
  """Their names for our weights. Each of ours must be in one of theirs."""
  leaves = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in arrays.items()}
  state = adapter.weights(config, leaves)
  sum(tensor.sum() for tensor in state.values()).backward()
  unused = [name for name, leaf in leaves.items() if leaf.grad is None]
  assert not unused, f"weights() leaves out {unused}"
  return state


def check_parts(module, state, config, directory):
  """The stand-ins of dev/official/satformer.py against dev/reference: a plain LLaMA with the same weights."""
  plain = llama.Llama(config).double()
  ours = model_dir.read_safetensors(directory / "model.safetensors")
  plain.load_state_dict({name: torch.tensor(ours[name]).double() for name in plain.state_dict()})
  names = dict(module.named_parameters())
  logits = torch.func.functional_call(module, {name: state[name] for name in names}, (TOKENS,))
  difference = (logits - plain(TOKENS)).abs().max().item()
  assert difference < 1e-12, f"the parts give other logits than dev/reference, by {difference:.3g}"


def check_row(name, adapter, options):
  with tempfile.TemporaryDirectory() as scratch:
    directory = pathlib.Path(scratch)
    model_dir.make_tiny(directory, **options)
    config = model_dir.read_config(directory / "config.json")
    state = check_weights(adapter, config, model_dir.read_safetensors(directory / "model.safetensors"))
    with common.doubles():
      module = adapter.build(config).double()
      logits = module(TOKENS)
      assert logits.shape == (*TOKENS.shape, config.vocab_size), f"logits {tuple(logits.shape)}"
      if name == "satformer" and config.arch != "mudd":  # which has three norms where LLaMA has one
        check_parts(module, state, config, directory)


def check(name):
  """One adapter, in this process. Returns how many rows it has."""
  stand_in_for_transformers(OfTuples if name == "denseformer" else Model)
  stand_in_for_checkouts(name)
  adapter = importlib.import_module(f"official.{name}")
  adapter.load(pathlib.Path("nowhere"))
  rows = {}
  for row, options in common.in_other_shapes(adapter.models()):
    rows.setdefault(row, options)
  for row, options in rows.items():
    try:
      check_row(name, adapter, options)
    except Exception:
      print(f"FAILED: {name}: {row}: {options}")
      raise
  print(f"{name}: {len(rows)} rows", flush=True)


def main():
  found = {path.stem for path in (pathlib.Path(__file__).parent / "official").glob("*.py")} - {"__init__", "common"}
  failed = sorted(found ^ set(NAMES))
  if failed:
    print(f"FAILED: dev/compare_official.py and dev/official do not have the same adapters: {failed}")
  for name in NAMES:
    child = os.fork()
    if child == 0:
      try:
        check(name)
        os._exit(0)
      except Exception:
        traceback.print_exc()
        os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
      print(f"FAILED: {name}")
      failed.append(name)
  print(f"{len(NAMES)} adapters, {len(failed)} failures")
  sys.exit(1 if failed else 0)


if __name__ == "__main__":
  main()
