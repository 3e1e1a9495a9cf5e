"""Several architectures in one model in PyTorch, such as "mhc+lime", put together from their classes.

Four things have one owner at most: what flows between sublayers (the stream), a layer's own queries, keys and values
(project), the keys and values that it attends to (route), and attention (mix, attend). Parts that want the same thing
are refused. The Attention, Layer and Backbone of a combination inherit from those of its parts. project, route, mix and
attend are their owner's. What takes and returns `shared` is called for every part with the part's own share of it: here
`shared` is a tuple of one share for each part.

In config.json an option keeps its name. Where two parts have one of the same name, the part stands in front:
lime_kv_init.
"""
import dataclasses

import torch

from .config import Config, option_keys
from .llama import Attention, Backbone, Layer, Llama


class Renamed:
  """A combination's configuration as one of its parts reads it. names: {option: its name in the combination}."""

  def __init__(self, config, names):
    self._config, self._names = config, names

  def __getattr__(self, name):
    return getattr(self._config, self._names.get(name, name))


class CombinedConfig(Config):
  parts, renamed = (), {}  # {config_class of a part: names, as above}

  def of(self, config_class):
    names = next((names for part, names in self.renamed.items() if issubclass(part, config_class)), {})
    return Renamed(self, names) if names else self

  def streams(self):
    return max(part.config_class.streams(self.of(part.config_class)) for part in self.parts)

  def one_stream(self):
    return all(part.config_class.one_stream(self.of(part.config_class)) for part in self.parts)


def initialise_all(module, classes):
  """Where two parts start the same parameter, the first one has the last word."""
  for part in reversed(classes):
    if hasattr(part, "initialise"):
      part.initialise(module)


class CombinedAttention(Attention):
  parts = ()

  def __init__(self, config, layer):
    super().__init__(config, layer)
    mixes = next((part for part in self.parts if replaces(part, "attention", "mix", "attend")), None)
    if mixes is not None and not hasattr(self, "k_proj"):
      projects = next(part for part in self.parts if replaces(part, "attention", "project"))
      refuse_pair(projects, mixes, f"layer {layer} has no keys and values of its own")

  def owned(self, method, inputs, shared):
    """What the owner's method makes of inputs and its own share. Without an owner, it is the plain backbone's."""
    for part, share in zip(self.parts, shared):
      if replaces(part, "attention", method):
        return getattr(part.attention, method)(self, *inputs, share)
    return getattr(Attention, method)(self, *inputs, ())

  def project(self, x, shared):
    return self.owned("project", (x,), shared)

  def mix(self, q, k, v, shared):
    return self.owned("mix", (q, k, v), shared)

  def route(self, keys, values, shared):
    return self.owned("route", (keys, values), shared)

  def attend(self, q, k, v, visible, scale, shared):
    return self.owned("attend", (q, k, v, visible, scale), shared)

  def keep(self, values, shared):
    return tuple(part.attention.keep(self, values, share) for part, share in zip(self.parts, shared))

  def leave(self, keys, values, shared):
    return tuple(part.attention.leave(self, keys, values, share) for part, share in zip(self.parts, shared))

  def initialise(self):
    initialise_all(self, [part.attention for part in self.parts])


class CombinedLayer(Layer):
  """sublayers is that of the stream's owner."""
  parts = ()

  def observe(self, x, shared):
    return tuple(part.layer.observe(self, x, share) for part, share in zip(self.parts, shared))

  def leave(self, inner, shared, step):
    return tuple(part.layer.leave(self, inner, share, step) for part, share in zip(self.parts, shared))

  def initialise(self):
    initialise_all(self, [part.layer for part in self.parts])


class CombinedBackbone(Backbone):
  """forward is that of the stream's owner."""
  parts = ()

  def __init__(self, config, layer, attention):
    if config.loop != "none":
      raise ValueError(f"{config.arch} takes no loop: one connection alone does")
    super().__init__(config, layer, attention)

  def begin(self, x, tokens):
    return tuple(part.backbone.begin(self, x, tokens) for part in self.parts)

  def initialise(self):
    initialise_all(self, [part.backbone for part in self.parts])


class Combined(Llama):
  parts = ()

  def __init__(self, config):
    observes = next((part for part in self.parts if part.observes_stream), None)
    if observes is not None and config.num_hidden_layers > 1 and not config.one_stream():
      refuse_pair(next(part for part in self.parts if OWNS["the stream"](part)), observes,
                  f"{observes.config_class.arch} makes keys and values of the stream, and there is not one alone")
    self.refuse_equal_tensors(config)
    super().__init__(config)

  def refuse_equal_tensors(self, config):
    """Two parts may not give attention a tensor of the same name."""
    layer, owner = config.num_hidden_layers - 1, {}
    with torch.device("meta"):
      plain = Attention(config, layer).state_dict()
      for part in self.parts:
        for name in part.attention(config, layer).state_dict().keys() - plain.keys():
          if owner.setdefault(name, part) is not part:
            refuse_pair(owner[name], part, f"both have the tensor {name}")


def replaces(part, kind, *methods):
  """Has the architecture's class of this kind ("attention", "layer" or "backbone") one of these methods of its own?"""
  return any(getattr(getattr(part, kind), method) is not getattr(getattr(Llama, kind), method) for method in methods)


OWNS = {
  "the stream": lambda part: replaces(part, "layer", "sublayers") or replaces(part, "backbone", "forward"),
  "a layer's own queries, keys and values": lambda part: replaces(part, "attention", "project"),
  "the choice of keys and values": lambda part: replaces(part, "attention", "route"),
  "attention": lambda part: replaces(part, "attention", "mix", "attend"),
}


def refuse_pair(one, other, why):
  names = [part.config_class.arch for part in (one, other)]
  raise ValueError(f"{names[0]} and {names[1]} do not combine: {why}")


def with_one_owner_each(parts):
  """The parts by the first thing they own. One that can do without a thing leaves it to the other one that owns it."""
  parts = list(parts)
  for thing, owns in OWNS.items():
    owners = [i for i, part in enumerate(parts) if owns(part)]
    for i in owners:
      if len(owners) > 1 and thing in parts[i].beside_owner:
        parts[i] = parts[i].beside_owner[thing]
    owners = [part for part in parts if owns(part)]
    if len(owners) > 1:
      refuse_pair(*owners[:2], f"both change {thing}")
  for one in parts:
    for other in parts:
      if replaces(one, "attention", "attend") and replaces(other, "attention", "route"):
        refuse_pair(other, one, f"{one.config_class.arch} attends to a layer's own keys and values")
  return sorted(parts, key=lambda part: [not owns(part) for owns in OWNS.values()])


def combined_config(stem, arch, parts):
  """A configuration with the options of all parts."""
  options = {part: {field.name: field for field in dataclasses.fields(part.config_class)
                    if field.name in option_keys(part.config_class)} for part in parts}
  fields, renamed = [("arch", str, arch)], {}
  for part in parts:
    of_others = {name for other in parts if other is not part for name in options[other]}
    names = {name: f"{part.config_class.arch}_{name}" for name in options[part] if name in of_others}
    renamed[part.config_class] = names
    for name, field in options[part].items():
      default = dataclasses.field(default=field.default, default_factory=field.default_factory)
      fields.append((names.get(name, name), field.type, default))
  return dataclasses.make_dataclass(stem + "Config", fields, bases=(CombinedConfig,),
                                    namespace={"parts": parts, "renamed": renamed})


def combined(*parts):
  """The class of a model that has all of these architectures: MhcAndLime of Mhc and Lime."""
  stem, arch = "And".join(part.__name__ for part in parts), "+".join(part.config_class.arch for part in parts)
  parts = with_one_owner_each(parts)
  def of_all(kind, first):
    """The class of this kind: first, which shares out `shared`, then the stream's owner's, then the others'."""
    classes = dict.fromkeys(getattr(part, kind) for part in parts)
    classes.pop(getattr(Llama, kind), None)
    return type(stem + kind.capitalize(), (first, *classes), {"parts": parts})
  return type(stem, (Combined,), {
    "parts": parts, "config_class": combined_config(stem, arch, parts), "layer": of_all("layer", CombinedLayer),
    "attention": of_all("attention", CombinedAttention), "backbone": of_all("backbone", CombinedBackbone)})
