"""What the comparisons with official code share: double precision, loss and gradients in our names, tiny models."""
import ast
import contextlib
import dataclasses
import itertools
import re
import sys
import types

import torch
import torch.nn.functional as F
from reference import model_dir
from torch.overrides import TorchFunctionMode

# Beside 4 layers of width 8: what two layers, or many, make special, and rows as wide as the kernels' vectors.
OTHER_SHAPES = (
  dict(num_hidden_layers=2), dict(num_hidden_layers=7), dict(hidden_size=64, head_dim=16, intermediate_size=40))


class Doubles(TorchFunctionMode):
  """While active, code that asks for float32 or bfloat16 gets float64: their rotary tables, norms and softmaxes."""

  NARROWING = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)

  def __torch_function__(self, function, types, args=(), kwargs=None):
    if function in self.NARROWING:
      return args[0].double()
    args = [torch.float64 if self.is_narrow(arg) else arg for arg in args]
    kwargs = {key: torch.float64 if self.is_narrow(arg) else arg for key, arg in (kwargs or {}).items()}
    return function(*args, **kwargs)

  @staticmethod
  def is_narrow(arg):
    return isinstance(arg, torch.dtype) and arg.is_floating_point


@contextlib.contextmanager
def doubles():
  """Everything that is made or computed inside is float64."""
  default = torch.get_default_dtype()
  torch.set_default_dtype(torch.float64)
  try:
    with Doubles():
      yield
  finally:
    torch.set_default_dtype(default)


def gradients(module, weights, config, arrays, inputs, targets):
  """(loss, {our name: gradient}) of an official module.

  `weights` makes the module's state dict out of {our name: tensor} by differentiable steps, so that autograd leads
  back to our names whatever they join, split or transpose. A parameter of theirs that stays without is an error.
  """
  leaves = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in arrays.items()}
  with doubles():
    state = weights(config, leaves)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
    given = {name: tensor.shape for name, tensor in state.items()}
    if given != shapes:
      raise RuntimeError(f"these weights are on one side only: {sorted(set(given.items()) ^ set(shapes.items()))}")
    out = torch.func.functional_call(module, state, (inputs,))
    logits = getattr(out, "logits", out)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
  loss.backward()
  if logits.dtype != torch.float64:
    raise RuntimeError(f"the official code computed in {logits.dtype}")
  return loss.item(), {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                       for name, leaf in leaves.items()}


def official_gradients(adapter, directory, inputs, targets):
  """The same, of the model in a directory of ours."""
  config = model_dir.read_config(directory / "config.json")
  arrays = model_dir.read_safetensors(directory / "model.safetensors")
  with doubles():
    module = adapter.build(config).double().train()
  return gradients(module, adapter.weights, config, arrays, inputs, targets)


def crossed(**choices):
  """Arguments of make_tiny: every combination. choices: name=[values, ...]."""
  return [dict(zip(choices, values)) for values in itertools.product(*choices.values())]


def in_other_shapes(models):
  """(row, options) as they come, the first two of each row also with other depths and a larger width."""
  seen = {}
  for row, options in models:
    yield row, options
    seen[row] = seen.get(row, 0) + 1
    if seen[row] <= 2 and "num_hidden_layers" not in options:
      for shape in OTHER_SHAPES:
        yield row, {**options, **shape}


def head(w):
  """The output weights of {our name: tensor}: the embedding's where they are tied."""
  return w.get("lm_head.weight", w["model.embed_tokens.weight"])


def renamed(w, *pairs):
  """{name: tensor} with parts of the names replaced, in order, and the head named."""
  out = {}
  for name, tensor in {**w, "lm_head.weight": head(w)}.items():
    for old, new in pairs:
      name = name.replace(old, new)
    out[name] = tensor
  return out


def llama_config(config):
  """Of transformers."""
  from transformers import LlamaConfig

  return LlamaConfig(
    **{key: getattr(config, key) for key in (
      "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
      "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings")},
    use_cache=False, max_position_embeddings=64)


def use(*directories):
  """Puts directories in front of the others that Python imports from."""
  sys.path[:0] = map(str, directories)


def parts_of_script(path, names, **given):
  """A module of some functions and classes of a script that trains when it is imported. given: what they use of its
  other names. A log that starts with its script will do: that ends at the first line of dashes or equal signs."""
  source = re.split("^[-=]{40,}$", path.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
  parts = [node for node in ast.parse(source).body if getattr(node, "name", None) in names]
  if missing := set(names) - {part.name for part in parts}:
    raise RuntimeError(f"{path} has no {' '.join(sorted(missing))}")
  module = types.ModuleType(path.stem)
  vars(module).update(torch=torch, nn=torch.nn, F=F, Tensor=torch.Tensor, dataclass=dataclasses.dataclass, **given)
  sys.modules[path.stem] = module  # where dataclasses look
  exec(compile(ast.Module(parts, []), path, "exec"), vars(module))
  return module
