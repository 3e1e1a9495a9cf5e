"""The same for Hugging Face's transformers: AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)."""
import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import cached_file

from .config import GPT2_KEYS, config_of
from .gpt2 import from_file, to_file
from .llama import Llama, Step


# Of a config.json that has no such key.
ABSENT = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True,
          "max_position_embeddings": None}  # the library asks for the last before it has read it


class CrossplyConfig(PretrainedConfig):
  """The keys of config.json, as they stand there."""
  keys_to_ignore_at_inference = ["past_key_values"]
  has_no_defaults_at_init = True

  def __getattr__(self, name):
    """Of what is not there: a GPT-2's sizes by LLaMA's names, which the library asks for."""
    if GPT2_KEYS.get(name) in vars(self):
      return getattr(self, GPT2_KEYS[name])
    if name in ABSENT:
      return ABSENT[name]
    raise AttributeError(name)

  def to_diff_dict(self):
    """What is saved. Where this key is absent LLaMA and GPT-2 mean different things."""
    return {**super().to_diff_dict(), "tie_word_embeddings": self.tie_word_embeddings}


def step_of(tokens, mask, positions, cache):
  """mask: (B, S), 0 at padding; None where there is none. positions: (B, T), or None."""
  T, device = tokens.shape[1], tokens.device
  before = cache.get_seq_length() if cache is not None else 0
  S = before + T
  visible = torch.ones(T, S, dtype=torch.bool, device=device).tril(before)[None, None]
  if mask is not None:
    itself = torch.eye(S, dtype=torch.bool, device=device)[before:]  # a softmax must have something, in padding too
    visible = visible & (mask[:, None, None, :].bool() | itself)
  if positions is None and mask is not None:
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, before:]
  elif positions is None:
    positions = torch.arange(before, S, device=device)[None]
  return Step(positions, visible, cache)


def read_weights(directory, subfolder="", **where):
  """{name in file: tensor}, of one file or of those that the index lists."""
  index = cached_file(directory, "model.safetensors.index.json", subfolder=subfolder, **where,
                      _raise_exceptions_for_missing_entries=False)
  files = ["model.safetensors"]
  if index:
    with open(index, encoding="utf-8") as text:
      files = sorted(set(json.load(text)["weight_map"].values()))
  parts = [load_file(cached_file(directory, file, subfolder=subfolder, **where)) for file in files]
  return {name: tensor for part in parts for name, tensor in part.items()}


class CrossplyForCausalLM(PreTrainedModel, GenerationMixin):
  reference = Llama  # the architecture's
  config_class = CrossplyConfig
  base_model_prefix = "model"
  accepts_loss_kwargs = False
  _supports_sdpa = True

  def __init__(self, config):
    super().__init__(config)
    module = self.reference(config_of(config.to_dict(), self.reference.config_class))
    self.model = module.model
    if not config.tie_word_embeddings:
      self.lm_head = module.lm_head
    self._no_split_modules = [module.layer.__name__]
    self.post_init()

  head = Llama.head

  def _init_weights(self, module):
    """Nothing: the parts start as they should."""

  def get_input_embeddings(self):
    return self.model.embed_tokens

  def set_input_embeddings(self, embeddings):
    self.model.embed_tokens = embeddings

  def get_output_embeddings(self):
    return getattr(self, "lm_head", None)

  def set_output_embeddings(self, head):
    self.lm_head = head

  def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, labels=None,
              use_cache=None, logits_to_keep=0, **more):
    """Logits (B, T, V), or of the last logits_to_keep tokens. labels (B, T): the tokens themselves, -100 where none."""
    for name in ("inputs_embeds", "output_hidden_states", "output_attentions"):
      if more.get(name) is not None and more[name] is not False:
        raise ValueError(f"crossply's models take no {name}")
    if isinstance(past_key_values, StaticCache):
      raise ValueError("crossply's models take no StaticCache, only a cache that grows: a DynamicCache")
    use_cache = self.config.use_cache if use_cache is None else use_cache
    if past_key_values is None and use_cache and labels is None:
      past_key_values = DynamicCache()
    x = self.model(input_ids, step_of(input_ids, attention_mask, position_ids, past_key_values))
    logits = self.head(x[:, -logits_to_keep:])
    loss = None
    if labels is not None:
      loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

  # A GPT-2's tensors stand in files otherwise than here.

  def load_state_dict(self, state_dict, *args, **more):
    if "transformer.wte.weight" in state_dict:
      state_dict = from_file(state_dict, {name: tensor.shape for name, tensor in self.state_dict().items()})
    return super().load_state_dict(state_dict, *args, **more)

  @classmethod
  def from_pretrained(cls, directory, *args, config=None, **more):
    where = {key: more[key] for key in ("cache_dir", "revision", "subfolder", "token") if key in more}
    if not isinstance(config, PretrainedConfig):
      config = cls.config_class.from_pretrained(config or directory, **where)
    if directory is None or "n_embd" not in config.to_dict():
      return super().from_pretrained(directory, *args, config=config, **more)
    with torch.device("meta"):
      shapes = {name: tensor.shape for name, tensor in cls(config).state_dict().items()}
    state = from_file(read_weights(directory, **where), shapes)
    loaded = super().from_pretrained(None, *args, config=config, state_dict=state, **more)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.name_or_path = model.config.name_or_path = str(directory)  # an adapter keeps it
    try:
      model.generation_config = GenerationConfig.from_pretrained(directory, **where)
    except OSError:  # there is none
      pass
    return loaded

  def save_pretrained(self, directory, *args, state_dict=None, **more):
    if "n_embd" in self.config.to_dict():
      state_dict = {name: tensor.contiguous() for name, tensor in to_file(state_dict or self.state_dict()).items()}
    super().save_pretrained(directory, *args, state_dict=state_dict, **more)
