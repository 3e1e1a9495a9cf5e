"""Pairs of architectures in one model (combined.py): those that go together, and those that are refused."""
import ast
import itertools
import pathlib

import torch

from . import model_dir
from .identities import TOKENS, L, put, same, tiny
from .llama import Step

# Options of tiny models in which all parts of the architecture count.
SIZES = {"gemma3n": {"hidden_size_per_layer_input": 6, "laurel_rank": 3}, "lime_static": {"top_p": 0.7},
         "shortcuts": {"mudd_width": 5}, "hyper": {"rate": 3}, "mhc": {"hc_mult": 3}}
NO_VALUES = {"value_embeds": "none"}
NO_STREAM = {"resid": False, "x0": False, "backout": False}
FROM_X0 = {**NO_STREAM, "value_from": "x0", "value_embeds": "list", "value_layers": [0, 2]}
STREAM = ("hyper", "mhc", "gated_streams", "vertical", "denseformer", "attnres", "mudd", "gemma3n", "shortcuts")
PROJECT = ("resformer", "satformer", "relay", "lime_static", "lime_dynamic", "kv_share", "mudd", "shortcuts")
KV = ("lime", "sla", "ala", "kv_share")
ATTEND = ("depth_attention", "moda")
OWNERS = {"stream": STREAM, "project": PROJECT, "kv": KV, "attend": ATTEND}
# Parts that change nothing; a satformer with gates of 0.
NOTHING = {"lime": {"routing": "own"}, "sla": {"distance": L}, "depth_attention": {"depth_start": L},
           "moda": {"depth_start": L}, "satformer": {}}
BACKBONES = ({"K": 2}, {"K": 4, "qk_norm": True, "qk_norm_eps": 1e-2, "tied": False},
             {"K": 4, "backbone": "gpt2", "max_position_embeddings": 9, "scale_attn_by_inverse_layer_idx": True})


def goes_together(one, other):
  """Written down anew, from what each of them owns."""
  pair = {one, other}
  both = [thing for thing, owners in OWNERS.items() if pair <= set(owners)]
  if pair == {"mudd", "shortcuts"}:
    return False
  if "shortcuts" in pair and len(both) == 1 and both[0] in ("stream", "project"):
    return pair & {"lime_static", "lime_dynamic", "kv_share", "resformer", "satformer", "relay"} or both == ["stream"]
  if both or pair == {"lime", "lime_static"}:  # whose routers have the same name
    return False
  if "moda" in pair and pair & set(KV) or pair == {"kv_share", "depth_attention"}:
    return False
  return not (pair & {"lime_static", "lime_dynamic"} and pair & set(STREAM) - {"gemma3n", "shortcuts"})


def pairs():
  """The arch and the options of every pair, and whether it must be refused."""
  names = [name for name in model_dir.ARCHITECTURES if name not in ("llama", "gpt2")]
  for one, other in itertools.combinations(names, 2):
    options = {**SIZES.get(one, {}), **SIZES.get(other, {})}
    if goes_together(one, other) and "shortcuts" in (one, other):
      rest = other if one == "shortcuts" else one
      options |= NO_STREAM if rest in STREAM else NO_VALUES if rest in PROJECT else {}
    yield f"{one}+{other}", options, not goes_together(one, other)
  yield "mhc+shortcuts", {**SIZES["mhc"], **FROM_X0}, False
  yield "gemma3n+shortcuts", {**SIZES["gemma3n"], **FROM_X0}, False
  yield "shortcuts+lime", {**FROM_X0, "embed_norm": True, "unet": True, "lanes_from": 2, "mudd_tail": "residual",
                           "mudd_width": 5}, False
  yield "shortcuts+depth_attention", {"mudd_tail": "both", "mudd_width": 5, "K": 4, "head_dim": 2}, False
  yield "lime_static+lime", {"routing": "average", "lime_static_kv_init": "fan_in"}, False
  yield "lime_dynamic+lime", {"lime_kv_init": "normal", "lime_dynamic_kv_init": "fan_in"}, False
  yield "vertical+relay", {"residual": False}, False
  yield "mhc+moda", {"reads": "previous", "depth_window": 1}, False
  yield "mudd+moda", {"norm": "none", "intermediate_sizes": [3, 5, 6, 10]}, False
  yield "hyper+resformer+lime", {"variant": "svformer"}, False
  yield "gemma3n+relay+lime+depth_attention", SIZES["gemma3n"], False
  engram = {"engram_layers": [0, 2], "engram_heads": 2, "engram_rows": 5}
  for arch in ("mhc+lime", "gemma3n+moda", "satformer+sla"):
    yield arch, {**engram, **SIZES.get(arch.split("+")[0], {})}, False
  for norm in ("branch", "sum"):
    yield "resformer+lime", {"block_norm": norm}, False
  yield "kv_share+moda", {"sharing": "suffix", "num_kv_shared_layers": 1}, True
  yield "shortcuts+lime_dynamic", {**NO_VALUES, "lanes_from": 2}, True
  yield "shortcuts+mhc", {"resid": False, "x0": False}, True
  yield "mhc+lime", {"loop": "stack", "loop_passes": 2}, True


def models():
  """Arguments of make_tiny for all pairs that go together, on one backbone after the other. Names are in the order in
  which crossply writes them."""
  for number, (arch, options, refused) in enumerate(pairs()):
    if not refused:
      names = [part.config_class.arch for part in model_dir.architecture(arch).parts]
      yield {"arch": "+".join(names), **BACKBONES[number % len(BACKBONES)], **options}


def with_cache(model, tokens, pieces):
  """Logits (B, T, V), so many tokens at a time."""
  cached, logits, done = {}, [], 0

  def remember(keys, values, run):
    if run in cached:
      keys, values = (torch.cat(both, dim=2) for both in zip(cached[run], (keys, values)))
    cached[run] = keys, values
    return cached[run]

  for T in pieces:
    visible = torch.ones(T, done + T, dtype=torch.bool).tril(done)[None, None]
    known = tokens[:, 0 if model.config.engram_layers else done : done + T]
    step = Step(torch.arange(done, done + T)[None], visible, known, remember=remember)
    logits.append(model.head(model.model.exits(tokens[:, done : done + T], step)[-1]))
    done += T
  return torch.cat(logits, dim=1)


def gradients(model):
  model.zero_grad()
  model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
  return {name: p.grad for name, p in model.named_parameters()}


def check_pair(check, arch, options):
  what = f"{arch} {options}"
  model = tiny(arch, **options)
  with torch.no_grad():
    whole = model(TOKENS)
    check(f"{what}: with a cache the logits are others",
          torch.allclose(with_cache(model, TOKENS, (2, 1, 2)), whole, rtol=1e-11, atol=1e-13))
  want = gradients(model)
  for name, gradient in want.items():
    of_one_source = name.startswith("model.layers.0.") and ("vertical_attention" in name or "_attention_res_" in name)
    check(f"{what}: {name} has no gradient", of_one_source or gradient is not None and bool((gradient != 0).any()))
  model.train()
  for layer in model.model.layers:
    layer.gradient_checkpointing = True
  for name, gradient in gradients(model).items():
    check(f"{what}: with checkpointing the gradient of {name} is another one", torch.equal(gradient, want[name]))
  torch.manual_seed(2)
  fresh = type(model)(model.config)
  check(f"{what}: a new model's logits are numbers", bool(fresh(TOKENS).isfinite().all()))


def check_refused(check, arch, options):
  try:
    tiny(arch, **options)
    complaint = ""
  except ValueError as refused:
    complaint = str(refused)
  check(f"{arch} {options} is refused with {complaint!r}", all(part in complaint for part in arch.split("+")))


def check_nothing_beside(check, backbone):
  """Beside a part that changes nothing, every architecture is what it is alone."""
  for arch in (*STREAM, *PROJECT, *KV, *ATTEND):
    options = {**SIZES.get(arch, {}), **backbone}
    alone = tiny(arch, **options)
    for nothing, off in NOTHING.items():
      if arch == nothing or not goes_together(arch, nothing) or {arch, nothing} == {"shortcuts", "satformer"}:
        continue
      both = tiny(f"{arch}+{nothing}", alone, **{**options, **off})
      if nothing == "satformer":
        put(both, alpha_proj_weight=0)
      check(f"{backbone}: {arch} beside {nothing} that does nothing is another model", same(both, alone))


def check_configs(check):
  for arch, options in (("mhc+lime", {}), ("hyper+satformer+lime", {"rate": 3}), ("shortcuts+moda", {"mudd_width": 5}),
                        ("lime_dynamic+lime", {})):
    model = tiny(arch, **options)
    turned = tiny("+".join(reversed(arch.split("+"))), model, **options)
    check(f"{arch} {options} is another model with its names in another order", same(turned, model))
  static = tiny("lime_static+lime", routing="average", lime_kv_init="normal", lime_static_kv_init="fan_in").config
  check("options of one name have their part's in front",
        (static.lime_kv_init, static.lime_static_kv_init, static.routing) == ("normal", "fan_in", "average"))
  for arch, word in (("lime+limes", "limes"), ("lime+lime", "twice"), ("llama+lime", "plain backbone")):
    try:
      tiny(arch)
      complaint = ""
    except ValueError as refused:
      complaint = str(refused)
    check(f"{arch} is refused with {complaint!r}", word in complaint)


def check_names(check):
  """A saved model has the files of its parts in one: no two may define the same name."""
  owner = {}
  for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
    text = path.read_text(encoding="utf-8")
    if "(Llama):\n" not in text and path.stem not in ("config", "engram", "gpt2", "llama", "hf", "combined"):
      continue
    for node in ast.parse(text).body:
      targets = node.targets if isinstance(node, ast.Assign) else [node]
      for name in (getattr(target, "id", getattr(target, "name", None)) for target in targets):
        first = owner.setdefault(name, path.stem)
        check(f"{first} and {path.stem} both define {name}", name is None or first == path.stem)


def run(check):
  for options in models():
    check_pair(check, options.pop("arch"), options)
  for arch, options, refused in pairs():
    if refused:
      check_refused(check, arch, options)
  with torch.no_grad():
    for backbone in BACKBONES:
      check_nothing_beside(check, backbone)
  check_configs(check)
  check_names(check)
