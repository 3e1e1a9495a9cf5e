"""Model directories: config.json and model.safetensors, read into and written from the reference modules."""
import json
import pathlib

import numpy as np
import torch

from .lime import Lime
from .llama import Config, Llama

ARCHITECTURES = {"llama": Llama, "lime": Lime}
DTYPES = {"F32": np.float32, "F64": np.float64}
# Config fields that live in the "crossply" object; the others are keys of a LLaMA config.json.
CROSSPLY_KEYS = ("arch", "qk_norm", "qk_norm_eps", "routing", "window")


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
  """Config from a config.json; what its absent keys mean is what transformers takes them to mean."""
  keys = json.loads(pathlib.Path(path).read_text())
  extra = keys.get("crossply", {})
  for key in extra:
    if key not in CROSSPLY_KEYS:
      raise ValueError(f'{path}: unknown key "{key}" in "crossply"')
  H = keys["num_attention_heads"]
  rope = keys.get("rope_parameters") or {}
  if rope.get("rope_type", "default") != "default" or keys.get("rope_scaling"):
    raise ValueError(f"{path}: scaled rotary positions are not supported")
  return Config(
    **{key: keys[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    num_attention_heads=H,
    num_key_value_heads=keys.get("num_key_value_heads") or H,
    head_dim=keys.get("head_dim") or keys["hidden_size"] // H,
    rms_norm_eps=keys.get("rms_norm_eps", 1e-6),
    rope_theta=rope.get("rope_theta", keys.get("rope_theta", 10000.0)),
    tie_word_embeddings=keys.get("tie_word_embeddings", False),
    **extra,
  )


def write_config(path, config):
  keys = {key: value for key, value in vars(config).items() if key not in CROSSPLY_KEYS}
  keys.update(hidden_act="silu", model_type="llama", architectures=["LlamaForCausalLM"], dtype="float32")
  if config.arch != "llama" or config.qk_norm:
    keys["crossply"] = {"arch": config.arch, "qk_norm": config.qk_norm}
    if config.qk_norm:
      keys["crossply"]["qk_norm_eps"] = config.qk_norm_eps
    if config.arch == "lime":
      keys["crossply"].update(routing=config.routing, window=config.window)
    # Nothing that knows only plain LLaMA must mistake this directory for one.
    keys.update(model_type=f"crossply_{config.arch}", architectures=["CrossplyForCausalLM"])
  pathlib.Path(path).write_text(json.dumps(keys, indent=2) + "\n")


def load(directory, dtype=torch.float64):
  """The module a directory describes, with its weights. Tensors that are missing or not wanted are errors."""
  directory = pathlib.Path(directory)
  config = read_config(directory / "config.json")
  model = ARCHITECTURES[config.arch](config).to(dtype)
  arrays = read_safetensors(directory / "model.safetensors")
  model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
  return model


def save(directory, model):
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  write_config(directory / "config.json", model.config)
  arrays = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
  write_safetensors(directory / "model.safetensors", arrays)


def make_tiny(directory, arch="llama", qk_norm=False, tied=True, seed=0, K=2, head_dim=None, **more):
  """A directory with a model of a few hundred random weights. `more` are fields of Config.

  A mistake anywhere shows in its gradients: the gains are not 1, the epsilon and the rotary base not the defaults, the
  router is noise everywhere, its masked entries included, and normed queries and keys are small enough to feel their
  epsilon. Yet it is tame enough for float32: each linear layer halves, no norm divides by nearly nothing.
  """
  C, H = 8, 4
  config = Config(vocab_size=7, hidden_size=C, intermediate_size=6, num_hidden_layers=4, num_attention_heads=H,
                  num_key_value_heads=K, head_dim=head_dim or C // H, tie_word_embeddings=tied, qk_norm=qk_norm,
                  arch=arch, **{"rms_norm_eps": 1e-4, "rope_theta": 100.0, **more})
  model = ARCHITECTURES[arch](config)
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      if parameter.ndim == 1:
        parameter.copy_(1 + 0.3 * noise)
      elif "embed_tokens" in name:
        parameter.copy_(noise)
      else:
        gain = 0.03 if qk_norm and ("q_proj" in name or "k_proj" in name) else 0.5
        parameter.copy_(gain * noise / parameter.shape[1] ** 0.5)
  save(directory, model)
  return model
