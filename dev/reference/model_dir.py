"""Model directories: config.json and model.safetensors, read into and written from the reference modules."""
import dataclasses
import functools
import json
import pathlib

import numpy as np
import torch

from . import gpt2
from .attnres import Attnres
from .combined import combined
from .config import GENERAL_KEYS, GPT2_KEYS, Config, check_choice, config_of, option_keys
from .denseformer import Denseformer
from .depth_attention import DepthAttention
from .gated_streams import GatedStreams
from .gemma3n import Gemma3n
from .hyper import Hyper
from .kv_share import KvShare
from .lime import Lime
from .lime_static import LimeDynamic, LimeStatic
from .llama import Gpt2, Llama
from .mhc import Mhc
from .moda import Moda
from .mudd import Mudd
from .relay import Relay
from .resformer import Resformer
from .satformer import Satformer
from .shortcuts import Shortcuts
from .skip_attention import Ala, Sla
from .vertical import Vertical

MODELS = (
  Llama, Gpt2, Lime, LimeStatic, LimeDynamic, Hyper, Vertical, Sla, Ala, Resformer, Satformer, Denseformer, Mudd,
  Attnres, KvShare, Mhc, Shortcuts, GatedStreams, DepthAttention, Moda, Gemma3n, Relay,
)
ARCHITECTURES = {model.config_class.arch: model for model in MODELS}
DTYPES = {"F32": np.float32, "F64": np.float64}


@functools.cache
def architecture(arch):
  """The class of a model, "mhc+lime" too."""
  parts = arch.split("+")
  for part in parts:
    check_choice("arch", part, ARCHITECTURES)
    if len(parts) > 1 and part in ("llama", "gpt2"):
      raise ValueError(f"arch {arch}: {part} is the plain backbone; leave it out")
    if parts.count(part) > 1:
      raise ValueError(f"arch {arch} names {part} twice")
  return combined(*(ARCHITECTURES[part] for part in parts)) if len(parts) > 1 else ARCHITECTURES[arch]


def model_type(arch):
  return "crossply_" + arch.replace("+", "_and_")


def read_safetensors(path):
  """{name: numpy array}. The file: a little-endian 64-bit header length, the header in JSON, the data."""
  raw = pathlib.Path(path).read_bytes()
  start = 8 + int.from_bytes(raw[:8], "little")
  header = json.loads(raw[8:start])
  header.pop("__metadata__", None)
  arrays = {}
  for name, entry in header.items():
    begin, end = entry["data_offsets"]
    arrays[name] = np.frombuffer(raw[start + begin : start + end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
  return arrays


def write_safetensors(path, arrays):
  """Writes {name: numpy array} in float32."""
  header, chunks, offset = {"__metadata__": {"format": "pt"}}, [], 0
  for name, array in arrays.items():
    data = np.ascontiguousarray(array, np.float32).tobytes()
    header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [offset, offset + len(data)]}
    chunks.append(data)
    offset += len(data)
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  pathlib.Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def read_config(path):
  """Config from a config.json, of a plain LLaMA, Mistral, Ministral, Qwen2, Qwen3 or GPT-2 too."""
  keys = json.loads(pathlib.Path(path).read_text())
  arch = keys.get("crossply", {}).get("arch", "gpt2" if "n_embd" in keys else "llama")
  if keys.get("model_type") == "qwen3":
    keys["crossply"] = {"qk_norm": True, "qk_norm_eps": keys["rms_norm_eps"]}
  if keys.get("model_type") == "qwen2":
    keys["crossply"] = {"qkv_bias": True}
  if "max_window_layers" in keys and not keys.get("layer_types"):
    keys["layer_types"] = ["sliding_attention" if layer >= keys["max_window_layers"] else "full_attention"
                           for layer in range(keys["num_hidden_layers"])]
  try:
    return config_of(keys, architecture(arch).config_class)
  except ValueError as problem:
    raise ValueError(f"{path}: {problem}") from None


def unusual(config):
  """{key: value} of those that every architecture has, where they are not as usual."""
  usual = {field.name: field.default for field in dataclasses.fields(Config)} | {"loop_layers": []}
  return {key: getattr(config, key) for key in GENERAL_KEYS if getattr(config, key) not in (usual[key], [], ())}


def cap_key(config):
  """Hugging Face's own key of the cap on logits, where there is one."""
  cap = config.final_logit_softcapping
  return {"final_logit_softcapping": cap} if cap else {}


def write_gpt2_config(path, config):
  keys = {key: getattr(config, field) for field, key in GPT2_KEYS.items()}
  for key in ("vocab_size", "tie_word_embeddings", "activation_function", "scale_attn_by_inverse_layer_idx"):
    keys[key] = getattr(config, key)
  keys.update(n_inner=config.intermediate_size, layer_norm_epsilon=config.rms_norm_eps, model_type="gpt2",
              architectures=["GPT2LMHeadModel"], dtype="float32", **cap_key(config))
  options = {key: getattr(config, key) for key in option_keys(type(config))} | unusual(config)
  if config.arch != "gpt2" or not config.bias or unusual(config) or cap_key(config):
    keys["crossply"] = {"arch": config.arch, "backbone": "gpt2", "bias": config.bias, **options}
    keys.update(model_type=model_type(config.arch), architectures=["CrossplyForCausalLM"])
  pathlib.Path(path).write_text(json.dumps(keys, indent=2) + "\n")


GPT2_FIELDS = ("max_position_embeddings", "bias", "activation_function", "scale_attn_by_inverse_layer_idx", "backbone")


def write_config(path, config):
  if config.backbone == "gpt2":
    return write_gpt2_config(path, config)
  own = option_keys(type(config))
  options = {key: getattr(config, key) for key in own} | unusual(config)
  keys = {key: value for key, value in vars(config).items() if key not in (*own, *GPT2_FIELDS, *GENERAL_KEYS)}
  arch, qk_norm, qk_norm_eps, qkv_bias = (keys.pop(key) for key in ("arch", "qk_norm", "qk_norm_eps", "qkv_bias"))
  del keys["final_logit_softcapping"]
  keys.update(cap_key(config))
  for key in ("rope_scaling", "sliding_window", "layer_types"):
    if not keys[key]:
      del keys[key]
  keys.update(hidden_act="silu", model_type="llama", architectures=["LlamaForCausalLM"], dtype="float32")
  if arch != "llama" or qk_norm or qkv_bias or "sliding_window" in keys or unusual(config) or cap_key(config):
    keys["crossply"] = {"arch": arch, "qk_norm": qk_norm, "qkv_bias": qkv_bias, **options}
    if qk_norm:
      keys["crossply"]["qk_norm_eps"] = qk_norm_eps
    # Nothing that knows only plain LLaMA must mistake this directory for one.
    keys.update(model_type=model_type(arch), architectures=["CrossplyForCausalLM"])
  pathlib.Path(path).write_text(json.dumps(keys, indent=2) + "\n")


def untie(config, arrays):
  """Of a head that the configuration ties to the embedding: one of equal values goes, another one makes it untied."""
  head = arrays.get("lm_head.weight") if config.tie_word_embeddings else None
  if head is None:
    return
  config.tie_word_embeddings = np.array_equal(
    head, arrays["transformer.wte.weight" if config.backbone == "gpt2" else "model.embed_tokens.weight"])
  if config.tie_word_embeddings:
    del arrays["lm_head.weight"]


def load(directory, dtype=torch.float64):
  """The module a directory describes, with its weights. Tensors that are missing or not wanted are errors."""
  directory = pathlib.Path(directory)
  config = read_config(directory / "config.json")
  arrays = read_safetensors(directory / "model.safetensors")
  untie(config, arrays)
  model = architecture(config.arch)(config).to(dtype)
  tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
  if config.backbone == "gpt2":
    tensors = gpt2.from_file(tensors, {name: tensor.shape for name, tensor in model.state_dict().items()})
  model.load_state_dict(tensors)
  return model


def as_in_files(model, tensors):
  """{name: tensor}, of a model's values or gradients, under the names and in the layouts of its files."""
  return gpt2.to_file(tensors) if model.config.backbone == "gpt2" else tensors


def save(directory, model):
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  write_config(directory / "config.json", model.config)
  arrays = {name: tensor.detach().numpy() for name, tensor in as_in_files(model, model.state_dict()).items()}
  write_safetensors(directory / "model.safetensors", arrays)


def tiny_value(name, initial, noise, qk_norm):
  """Random values for a parameter: far from where nothing would be noticed, near enough to be tame.

  Gains, scales and scalars spread about 1, what starts as the plain model about that, scores and biases about 0.
  """
  last = name.rsplit(".", 1)[-1]
  if "model.embed_" in name or last in ("scores", "lambda_logits"):
    return noise
  if last in ("static_alpha", "static_weight") or "dwa_modules" in name:
    return initial + 0.2 * noise
  if last == "bias" or "hc_norm" in name:
    return 0.3 * noise
  if last in ("dynamic_alpha_proj", "dynamic_beta_proj"):
    return 0.5 * noise / len(noise) ** 0.5
  if last in ("dynamic_alpha_scale", "dynamic_beta_scale"):
    return 0.2 + 0.06 * noise
  if noise.ndim == 1 or last in ("q_weight", "k_weight"):
    return 1 + 0.3 * noise
  gain = 0.03 if qk_norm and ("q_proj" in name or "k_proj" in name) else 0.5
  return gain * noise / noise.shape[1] ** 0.5


def windows(pattern, window):
  """Options of make_tiny: S for layers that see so many tokens, L for those that see all."""
  names = {"S": "sliding_attention", "L": "full_attention"}
  return {"sliding_window": window, "layer_types": [names[letter] for letter in pattern]}


def make_tiny(directory, arch="llama", qk_norm=False, tied=True, seed=0, K=2, head_dim=None, **more):
  """A directory with a model of a few hundred random weights. `more` are fields of Config.

  A mistake anywhere shows in its gradients: the gains are not 1, the epsilon and the rotary base not the defaults,
  routers are noise everywhere, masked entries included, and normed queries and keys are small enough to feel their
  epsilon. Yet it is tame enough for float32: each linear layer halves, no norm divides by nearly nothing.
  """
  model_class = architecture(arch)
  fields = dict(vocab_size=7, hidden_size=8, intermediate_size=6, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=K, tie_word_embeddings=tied, qk_norm=qk_norm, rms_norm_eps=1e-4, rope_theta=100.0)
  fields.update(more)
  if "gpt2" in (arch, fields.get("backbone")):
    fields.update(backbone="gpt2", arch="gpt2" if arch == "llama" else arch)
  head_dim = head_dim or fields["hidden_size"] // fields["num_attention_heads"]
  config = model_class.config_class(head_dim=head_dim, **fields)
  model = model_class(config)
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      parameter.copy_(tiny_value(name, parameter, noise, qk_norm))
  save(directory, model)
  return model
