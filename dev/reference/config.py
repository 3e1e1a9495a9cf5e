"""What a config.json says. Its keys are those of Hugging Face's LLaMA or GPT-2; "crossply" holds what those have no key
for.
"""
import dataclasses

from .engram import ENGRAM_KEYS


@dataclasses.dataclass
class Config:
  vocab_size: int  # V
  hidden_size: int  # C
  intermediate_size: int  # F
  num_hidden_layers: int  # L
  num_attention_heads: int  # H
  num_key_value_heads: int  # K
  head_dim: int  # D, which need not be C / H
  rms_norm_eps: float = 1e-6
  rope_theta: float = 10000.0
  rope_scaling: dict | None = None  # the keys of transformers' rope_parameters; rope_type linear, llama3 or yarn
  tie_word_embeddings: bool = False
  initializer_range: float = 0.02  # of linear layers and embeddings
  qk_norm: bool = False
  qk_norm_eps: float = 1e-5
  qkv_bias: bool = False  # of the projections of queries, keys and values, as in Qwen2
  sliding_window: int | None = None  # how many tokens a layer with "sliding_attention" sees, the query's own among them
  layer_types: list = dataclasses.field(default_factory=list)  # or "full_attention", one for each layer
  arch: str = "llama"
  backbone: str = "llama"  # or gpt2, for which rope and qk_norm mean nothing, and the following are
  max_position_embeddings: int = 2048  # learned positions
  bias: bool = True
  activation_function: str = "gelu_new"
  scale_attn_by_inverse_layer_idx: bool = False  # the logits of layer i (from 0) are divided by i + 1, too
  loop: str = "none"  # none | anchor: some layers run loop_passes times | stack: the whole model does; see Backbone
  loop_passes: int = 1
  loop_layers: list = dataclasses.field(default_factory=list)  # before the core, in it, behind it; empty: thirds
  loop_tied: bool = True  # False: every pass has layers of its own, one behind the other in num_hidden_layers
  loop_norm: str = "passes"  # passes | all | none
  loop_alpha: float = 1.0
  loop_end: bool = True
  exit_gate: bool = False  # of a stack: what a token's loss is of is decided pass by pass
  exit_beta: float = 0.05
  final_logit_softcapping: float = 0.0  # c: logits z are c tanh(z / c); 0: no cap
  block_norm: str = "pre"  # pre | branch | sum: a second norm, of a sublayer's output or of the stream after it
  engram_layers: tuple | list = ()  # in front of these
  engram_order: int = 3  # the largest n
  engram_heads: int = 8  # of each n
  engram_width: int = 0  # M; 0: C
  engram_rows: int = 65536  # least size of an n-gram's and head's table
  engram_boundary: tuple | list = ()  # tokens that end a document
  engram_pad_id: int = 0
  engram_seed: int = 0
  engram_map: str | list = "none"  # or a number for each token
  engram_multipliers: tuple | list = ()  # in place of drawn ones, for each of the layers

  def passes_of_model(self):
    return self.loop_passes if self.loop == "stack" else 1

  def window_of(self, layer):
    """How many tokens the layer sees; None: all."""
    slides = self.sliding_window is not None and self.layer_types[layer] == "sliding_attention"
    return self.sliding_window if slides else None

  def streams(self):
    """How many the layers keep beside each other."""
    return 1

  def one_stream(self):
    """Is what flows from layer to layer one stream, (B, T, C)?"""
    return True

  def of(self, config_class):
    """This, as the architecture of that config_class reads it: with its options by their own names."""
    return self


GPT2_KEYS = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
             "max_position_embeddings": "n_positions"}


# Keys of "crossply" that every architecture has.
GENERAL_KEYS = ("loop", "loop_passes", "loop_layers", "loop_tied", "loop_norm", "loop_alpha", "loop_end",
                "exit_gate", "exit_beta", "block_norm",                *ENGRAM_KEYS)


def applications(config):
  """Which layer runs when, one entry a run, and the places in that list where the core's passes begin and end. Of a
  stack, one pass."""
  L, R = config.num_hidden_layers, config.loop_passes
  check_choice("loop", config.loop, ("none", "anchor", "stack"))
  if config.loop != "anchor":
    return list(range(L)), []
  check_choice("loop_norm", config.loop_norm, ("none", "passes", "all"))
  prelude, core, coda = config.loop_layers or (L // 3, L // 3 + (L % 3 > 0), L - 2 * (L // 3) - (L % 3 > 0))
  if prelude + core * (1 if config.loop_tied else R) + coda != L or core < 1:
    raise ValueError(f"loop_layers {config.loop_layers} do not make {L} layers")
  passes = [prelude + r * core for r in range(R + 1)]
  if not config.loop_tied:
    return list(range(L)), passes
  middle = list(range(prelude, prelude + core))
  return [*range(prelude), *(middle * R), *range(prelude + core, L)], passes


def check_choice(name, value, choices):
  """Raises ValueError for a value of a Config field that is none of the choices."""
  if value not in choices:
    raise ValueError(f"{name} is {value!r}, not one of {', '.join(choices)}")


def option_keys(config_class):
  """The fields that are the architecture's own."""
  plain = {field.name for field in dataclasses.fields(Config)}
  return [field.name for field in dataclasses.fields(config_class) if field.name not in plain]


def config_of(keys, config_class):
  """From the keys of a config.json; what absent ones mean is what transformers takes them to mean."""
  extra = keys.get("crossply", {})
  gpt2 = "n_embd" in keys
  for key in extra:
    known = ("backbone", "bias") if gpt2 else ("backbone", "qk_norm", "qk_norm_eps", "qkv_bias")
    check_choice('a key in "crossply"', key, ("arch", *known, *GENERAL_KEYS, *option_keys(config_class)))
  same = ("vocab_size", "tie_word_embeddings", "initializer_range")
  return config_class(**{**(gpt2_fields(keys) if gpt2 else llama_fields(keys)),
                         **{key: keys[key] for key in same if key in keys},
                         "final_logit_softcapping": keys.get("final_logit_softcapping") or 0.0, **extra})


def llama_fields(keys):
  H = keys["num_attention_heads"]
  rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
  kind = rope.get("rope_type", rope.get("type", "default"))
  check_choice("rope_type", kind, ("default", "linear", "llama3", "yarn"))
  length = rope.get("original_max_position_embeddings") or keys.get("max_position_embeddings")
  return {
    **{key: keys[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")},
    "num_attention_heads": H,
    "num_key_value_heads": keys.get("num_key_value_heads") or H,
    "head_dim": keys.get("head_dim") or keys["hidden_size"] // H,
    "rms_norm_eps": keys.get("rms_norm_eps", 1e-6),
    "rope_theta": rope.get("rope_theta", keys.get("rope_theta", 10000.0)),
    "rope_scaling": None if kind == "default" else {**rope, "rope_type": kind,
                                                    "original_max_position_embeddings": length},
    **window_fields(keys),
  }


def window_fields(keys):
  """All layers have the window where nothing lists those that do."""
  if keys.get("sliding_window") is None or not keys.get("use_sliding_window", True):
    return {}
  types = keys.get("layer_types") or ["sliding_attention"] * keys["num_hidden_layers"]
  for layer_type in types:
    check_choice("a layer's type", layer_type, ("sliding_attention", "full_attention"))
  return {"sliding_window": keys["sliding_window"], "layer_types": types}


def gpt2_fields(keys):
  return {
    **{field: keys[key] for field, key in GPT2_KEYS.items()},
    "backbone": "gpt2",
    "intermediate_size": keys.get("n_inner") or 4 * keys["n_embd"],
    "num_key_value_heads": keys["n_head"],
    "head_dim": keys["n_embd"] // keys["n_head"],
    "rms_norm_eps": keys.get("layer_norm_epsilon", 1e-5),
    "tie_word_embeddings": True,
    "activation_function": keys.get("activation_function", "gelu_new"),
    "scale_attn_by_inverse_layer_idx": keys.get("scale_attn_by_inverse_layer_idx", False),
  }
