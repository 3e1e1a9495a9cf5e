"""The same for Hugging Face's transformers: AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)."""
import inspect
import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import Cache, DynamicCache, GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import cached_file

from .config import GPT2_KEYS, config_of
from .gpt2 import from_file, to_file
from .llama import Llama, Step, documents_of, of_one_document, softcap


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


# What the library calls the cache, among what forward takes and returns: this since 5.24, past_key_values before.
CACHE = "cache" if "cache" in inspect.signature(CausalLMOutputWithPast).parameters else "past_key_values"
# What callers pass that says nothing new: a cache knows where it stands, and there is one type of tokens.
HARMLESS = ("cache_position", "token_type_ids")


def said_again(positions):
  """What a collator that lays documents end to end may say beside their positions (1, T): where they begin and, last,
  end, how long the longest is, and their numbers."""
  documents = documents_of(positions)
  lengths = documents[0].bincount()
  bounds, longest = F.pad(lengths.cumsum(0), (1, 0)), lengths.max()
  return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest,
          "seq_idx": documents}


def refuse(more, positions):
  """Raises ValueError for an argument that would be ignored; None and False ask for nothing. positions: those that say
  where documents begin, or None."""
  asked = {name: value for name, value in more.items()
           if value is not None and value is not False and name not in HARMLESS}
  known = said_again(positions) if asked and positions is not None and positions.shape[:-1] == (1,) else {}
  for name, value in asked.items():
    if name not in known:
      raise ValueError(f"crossply's models take no {name}")
    if not torch.equal(torch.as_tensor(value).to(known[name]), known[name]):
      raise ValueError(f"{name} is {value}, and position_ids say {known[name]}")


def the_cache(past_key_values, cache, runs):
  """The one that was given by either name, with a place for each run of a layer."""
  if cache is not None and past_key_values is not None:
    raise ValueError("past_key_values and cache are two names of one argument: give one of them")
  cache = past_key_values if cache is None else cache
  if cache is not None and (not isinstance(cache, Cache) or cache.is_compileable):
    raise ValueError(f"crossply's models take a cache that grows, a DynamicCache, not a {type(cache).__name__}")
  places = getattr(cache, "layers", [])  # the library makes as many as there are layers, or each when it is needed
  for number, place in enumerate(places):
    if getattr(place, "is_sliding", False):  # it forgets, and by the window of a layer instead of a run's
      if place.get_seq_length() > 0:
        raise ValueError("crossply's models take a cache that keeps all tokens, and this one kept those of a window")
      places[number] = DynamicLayer()
  while 0 < len(places) < runs:
    places.append(type(places[0])())
  return cache


def check_places(tokens, mask, positions, cache):
  """Raises ValueError for masks and positions that mean something else than padding, documents, or nothing."""
  (B, T), S = tokens.shape, tokens_before(cache) + tokens.shape[1]
  if mask is not None and mask.shape != (B, S):
    raise ValueError(f"attention_mask must be (batch, tokens so far), {B, S} here, not {tuple(mask.shape)}")
  if positions is not None and (positions.ndim != 2 or positions.shape[0] not in (1, B) or positions.shape[1] != T):
    raise ValueError(f"position_ids must be (batch, tokens), {B, T} here, not {tuple(positions.shape)}")
  if T == 1:  # when it generates, token by token: nothing that waits for the device
    return
  if mask is not None and not ((mask == 0) | (mask == 1)).all():
    raise ValueError("attention_mask may hold 0 for padding and 1 for tokens, nothing else")
  if positions is not None:
    cached, real = torch.full((B, 1), S - T), torch.ones(B, T)
    if mask is not None:
      cached, real = mask[:, : S - T].sum(1, keepdim=True), mask[:, S - T :]
    rows, columns = real.to(positions.device).nonzero(as_tuple=True)
    taken = positions.expand(B, T)[rows, columns]  # of one real token after the other, whatever stands at padding
    falls = (taken.diff() <= 0) & (rows.diff() == 0)
    beside = mask is not None or cache is not None
    if beside and falls.any() or (taken < cached.to(positions.device)[rows, 0]).any():
      raise ValueError("position_ids must rise along a row. Where they start again, documents are packed, which takes "
                       "position_ids without attention_mask and cache; else give each document a row of its own, "
                       "padded. Behind a cache position_ids go on from the number of tokens in it")


def documents_in(positions):
  """documents_of(positions), or None where each row is one."""
  documents = None if positions is None else documents_of(positions)
  return documents if documents is not None and documents.any() else None


def tokens_before(cache):
  """How many earlier calls left."""
  return 0 if cache is None else cache.get_seq_length()


def with_earlier(tokens, mask, cache, layers):
  """Tokens (B, S), with those of earlier calls, -1 at padding: the cache keeps them behind the layers' keys, so that
  what reorders, repeats or cuts these does it to them."""
  if mask is not None:
    tokens = tokens.masked_fill(mask[:, -tokens.shape[1] :].to(tokens.device) == 0, -1)
  if cache is None:
    return tokens
  while cache.layer_class_to_replicate is None and len(cache.layers) <= layers:
    cache.layers.append(DynamicLayer())
  tokens = tokens[:, None, :, None]
  return cache.update(tokens, tokens[..., :0], layers)[0][:, 0, :, 0]


def step_of(tokens, mask, positions, documents, cache, config):
  """mask: (B, S), 0 at padding; None where there is none. positions, documents: (B or 1, T), or None."""
  T, device, before = tokens.shape[1], tokens.device, tokens_before(cache)
  S = before + T
  visible = torch.ones(T, S, dtype=torch.bool, device=device).tril(before)[None, None]
  if mask is not None:
    itself = torch.eye(S, dtype=torch.bool, device=device)[before:]  # a softmax must have something, in padding too
    visible = visible & (mask[:, None, None, :].bool() | itself)
  if documents is not None:
    visible = visible & of_one_document(documents)
  if positions is None and mask is not None:
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, before:]
  elif positions is None:
    positions = torch.arange(before, S, device=device)[None]
  if config.engram_layers:
    tokens = with_earlier(tokens, mask, cache, config.num_hidden_layers * config.passes_of_model())
  return Step(positions, visible, tokens, documents, None if cache is None else cache.update)


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


def place(model, device_map, max_memory=None, offload_folder=None):
  """On devices, as from_pretrained takes them; the library does so itself where it reads the files."""
  from accelerate import dispatch_model, infer_auto_device_map
  from accelerate.utils import get_balanced_memory
  whole = model._no_split_modules
  if device_map in ("auto", "balanced", "balanced_low_0"):
    low_zero = device_map == "balanced_low_0"
    max_memory = get_balanced_memory(model, max_memory, no_split_module_classes=whole, low_zero=low_zero)
  if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
    device_map = infer_auto_device_map(model, max_memory, no_split_module_classes=whole)
  elif not isinstance(device_map, dict):
    device_map = {"": device_map}
  if device_map == {"": "disk"}:  # accelerate writes there what has a name
    device_map = {part: "disk" for part, _ in model.named_children()}
  dispatch_model(model, device_map, offload_dir=offload_folder)


class CrossplyModel:
  """In front of the architecture's Backbone: called as the library calls what is below the head."""

  def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, cache=None,
              use_cache=None, return_dict=None, **more):
    """What the head reads, (B, T, C). Packed documents leave no cache: what follows a row is of its last one only."""
    cache = the_cache(past_key_values, cache, len(self.runs) * self.config.passes_of_model())
    alone = position_ids if attention_mask is None and cache is None else None  # the only ones that say of documents
    refuse(more, alone)
    if input_ids is None:
      raise ValueError("crossply's models take tokens: input_ids")
    check_places(input_ids, attention_mask, position_ids, cache)
    documents = documents_in(alone)
    if self.training and torch.is_grad_enabled() and any(layer.gradient_checkpointing for layer in self.layers):
      if cache is not None:
        raise ValueError(f"gradient checkpointing would write to {CACHE} twice: give none")
    elif cache is None and use_cache and documents is None:
      cache = DynamicCache()
    step = step_of(input_ids, attention_mask, position_ids, documents, cache, self.config)
    x = self.exits(input_ids, step, super().forward)[-1]
    output = BaseModelOutputWithPast(last_hidden_state=x, **{CACHE: cache})
    return output.to_tuple() if return_dict is False else output


class CrossplyForCausalLM(PreTrainedModel, GenerationMixin):
  reference, model_class = Llama, CrossplyModel  # the architecture's
  config_class = CrossplyConfig
  base_model_prefix = "model"
  accepts_loss_kwargs = False
  supports_gradient_checkpointing = True
  _supports_cache_class = True
  _supports_sdpa = True
  _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

  def __init__(self, config):
    super().__init__(config)
    module = self.reference(config_of(config.to_dict(), self.reference.config_class))
    self.model = module.model
    self.model.__class__ = self.model_class
    if config.tie_word_embeddings:  # the library ties them; to it every head is a module
      self.lm_head = nn.Linear(module.config.hidden_size, module.config.vocab_size, bias=False)
    else:
      self.lm_head = module.lm_head
    self._no_split_modules = [module.layer.__name__]
    self.post_init()

  def _init_weights(self, module):
    """Nothing: the parts start as they should."""

  def get_input_embeddings(self):
    return self.model.embed_tokens

  def set_input_embeddings(self, embeddings):
    self.model.embed_tokens = embeddings

  def get_output_embeddings(self):
    return self.lm_head

  def set_output_embeddings(self, head):
    self.lm_head = head

  def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, cache=None,
              labels=None, use_cache=None, logits_to_keep=0, num_items_in_batch=None, return_dict=None, **more):
    """Logits (B, T, V), or of the last logits_to_keep tokens, or of those that such a tensor lists. labels (B, T): the
    tokens themselves, -100 where none; the loss is their mean, or their sum divided by num_items_in_batch. With an
    exit gate it is that of the last exit."""
    if use_cache is None:
      use_cache = self.config.use_cache and labels is None
    for name in ("output_hidden_states", "output_attentions"):
      more = {name: getattr(self.config, name, None), **more}
    body = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids,
                      past_key_values=past_key_values, cache=cache, use_cache=use_cache, **more)
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    logits = softcap(self.lm_head(body.last_hidden_state[:, kept]), self.model.config.final_logit_softcapping)
    loss = None
    if labels is not None:
      if logits.shape[:2] != labels.shape:
        raise ValueError(f"labels must be (batch, tokens), as the logits {tuple(logits.shape[:2])}, not "
                         f"{tuple(labels.shape)}")
      total = "mean" if num_items_in_batch is None else "sum"
      loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().to(logits.device),
                             ignore_index=-100, reduction=total)
      if num_items_in_batch is not None:
        loss = loss / torch.as_tensor(num_items_in_batch, device=loss.device)
    output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: getattr(body, CACHE)})
    whole = getattr(self.config, "return_dict", True) if return_dict is None else return_dict
    return output if whole else output.to_tuple()

  def prepare_inputs_for_generation(self, *args, attention_mask=None, **kwargs):
    """The library's. What is written next must stand after a token."""
    if attention_mask is not None and attention_mask.ndim == 2 and not attention_mask[:, -1].all():
      raise ValueError('a prompt ends in padding: pad on the left (padding_side="left" of the tokenizer)')
    return super().prepare_inputs_for_generation(*args, attention_mask=attention_mask, **kwargs)

  # A GPT-2's tensors stand in files otherwise than here.

  def in_files(self, state=None):
    """{name: tensor}, of the model or of this state, without a head that is the embedding."""
    state = self.state_dict() if state is None else state
    tied = self.config.tie_word_embeddings
    return {name: tensor for name, tensor in state.items() if not (tied and name == "lm_head.weight")}

  def load_state_dict(self, state_dict, *args, **more):
    if "transformer.wte.weight" in state_dict:
      state_dict = from_file(state_dict, {name: tensor.shape for name, tensor in self.in_files().items()})
    if self.config.tie_word_embeddings and "model.embed_tokens.weight" in state_dict:
      state_dict = {"lm_head.weight": state_dict["model.embed_tokens.weight"], **state_dict}
    return super().load_state_dict(state_dict, *args, **more)

  @classmethod
  def from_pretrained(cls, directory, *args, config=None, **more):
    where = {key: more[key] for key in ("cache_dir", "revision", "subfolder", "token") if key in more}
    if not isinstance(config, PretrainedConfig):
      config = cls.config_class.from_pretrained(config or directory, **where)
    if directory is None or "n_embd" not in config.to_dict():
      return super().from_pretrained(directory, *args, config=config, **more)
    with torch.device("meta"):
      shapes = {name: tensor.shape for name, tensor in cls(config).in_files().items()}
    state = from_file(read_weights(directory, **where), shapes)
    placed = {key: more.pop(key) for key in ("device_map", "max_memory", "offload_folder") if key in more}
    loaded = super().from_pretrained(None, *args, config=config, state_dict=state, **more)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.name_or_path = model.config.name_or_path = str(directory)  # an adapter keeps it
    try:
      model.generation_config = GenerationConfig.from_pretrained(directory, **where)
    except OSError:  # there is none
      pass
    if placed.get("device_map") is not None:
      place(model, **placed)
    return loaded

  def save_pretrained(self, directory, *args, state_dict=None, **more):
    if "n_embd" in self.config.to_dict():
      state_dict = {name: tensor.contiguous() for name, tensor in to_file(self.in_files(state_dict)).items()}
    super().save_pretrained(directory, *args, state_dict=state_dict, **more)
