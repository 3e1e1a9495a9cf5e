"""Settings at which an architecture must be plain LLaMA, or another architecture, or itself with other options."""
import dataclasses
import math
import re
import tempfile

import torch

from . import hyper, model_dir
from .lime_static import keep_top

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 5, 3, 0]])
L = 4
# Softmax gives what is far below the others nothing at all.
NEVER = -1000.0


def tiny(arch="llama", like=None, **options):
  """A tiny model in double; with `like`, it takes over all parameters that the two have in common."""
  with tempfile.TemporaryDirectory() as directory:
    model_dir.make_tiny(directory, arch=arch, seed=5, **options)
    model = model_dir.load(directory)
  if like is not None:
    model.load_state_dict(like.state_dict(), strict=False)
  return model


def same(a, b, rtol=1e-12):
  """The models give the same logits to rounding."""
  return torch.allclose(a(TOKENS), b(TOKENS), rtol=rtol, atol=1e-2 * rtol)


def put(model, **values):
  """Sets all parameters whose name ends so (with _ for a dot) to a number, or what a function of the layer gives."""
  for ending, value in values.items():
    found = [(name, p) for name, p in model.named_parameters() if name.replace(".", "_").endswith(ending)]
    assert found, ending
    for name, parameter in found:
      layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
      parameter.copy_(torch.as_tensor(value(layer) if callable(value) else value).expand_as(parameter))
  return model


def neutral(options):
  """Models that must be the plain backbone, a LLaMA or a GPT-2 without biases, each with its name."""
  plain = tiny(**options)
  last = lambda layer: torch.tensor([NEVER] * layer + [0.0])
  for gate in ("relu", "tanh", "identity"):
    yield f"satformer {gate}, alpha 0", put(tiny("satformer", plain, gate=gate, **options), alpha_proj_weight=0)
  yield "resformer, scale 0, lambda2 1", put(tiny("resformer", plain, **options), lambda_scale=0, lambda2=1)
  for dilation, period in ((1, 1), (2, 1), (1, 2), (2, 3), (3, 2)):
    model = tiny("denseformer", plain, dilation=dilation, period=period, **options)
    for average in model.model.dwa_modules["alphas"].values():
      average.weight.copy_(torch.eye(len(average.sources))[-1])
    yield f"denseformer {dilation}x{period}, identity", model
  norm = {f"input_layernorm_{way}_weight": lambda i: plain.model.layers[i].input_layernorm.weight for way in "qkv"}
  one_hot = lambda layer: torch.eye(layer + 2)[-1]
  mudd = lambda kind: put(tiny("mudd", plain, norm=kind, **options), **norm, da_w2_weight=0)
  yield "mudd none, newest only", put(mudd("none"), static_weight=one_hot)
  yield "mudd prepost, nothing mixed", put(mudd("prepost"), static_weight=0)
  yield "depth_attention, no layer that mixes", tiny("depth_attention", plain, depth_start=L, **options)
  yield "moda, no layer that reads", tiny("moda", plain, depth_start=L, **options)
  yield "kv_share, every layer an owner", tiny("kv_share", plain, cla_factor=1, **options)
  yield "vertical, own layer only", put(tiny("vertical", plain, **options), vertical_attention_scores=last)
  yield "ala, stride L", tiny("ala", plain, stride=L, **options)
  yield "sla, distance L", tiny("sla", plain, distance=L, **options)
  yield "hyper, one stream, static", put(
    tiny("hyper", plain, rate=1, dynamic=False, prenorm="rmsnorm", **options), static_alpha=1, static_beta=1)
  for mixing in ("sinkhorn", "identity", "permutations"):
    for reads in ("own", "previous"):
      model = tiny("mhc", plain, mixing=mixing, reads=reads, hc_eps=0.0, **options)
      for name, parameter in model.named_parameters():
        if name.endswith("hc_base") or re.search(r"(attn|ffn)_hc\.base", name):
          parameter[:4] = -math.log(3)  # the mean of four streams
          parameter[4:8] = 0
        elif "hc_" in name and "scale" in name or name.endswith("_hc.scale"):
          parameter.zero_()
      yield f"mhc {mixing}, reads {reads}, equal streams", model
  still = put(tiny("shortcuts", plain, **options), resid_lambdas=1, x0_lambdas=0, backout_lambda=0)
  for table in still.model.value_embeds.values():
    table.weight.zero_()
  yield "shortcuts, none taken", still
  yield "shortcuts, none there", tiny(
    "shortcuts", plain, value_embeds="none", resid=False, x0=False, backout=False, **options)
  pack = tiny("shortcuts", plain, value_from="x0", unet=True, lanes_from=1, mudd_tail="residual", **options)
  yield "shortcuts of the speed runs, none taken", put(
    pack, resid_lambdas=1, x0_lambdas=0, backout_lambda=0, ve_proj_weight=0, skip_weights=0, lane_post=1, lane_resid=1,
    w2_weight=0, tail_0_bias=0, tail_1_bias=0)
  if options.get("backbone") != "gpt2":  # whose norm takes off a mean
    yield "gated_streams, no gates, doubled gains", ungated(plain, options)
  gain = lambda i: plain.model.layers[i].input_layernorm.weight
  yield "lime_static, own layer only", put(
    tiny("lime_static", plain, **options), lime_router_weight=last, lime_layernorm_weight=gain)


def ungated(plain, options):
  """All gates 1/2, all factors 1, gains that make up for it."""
  model = tiny("gated_streams", plain, **options)
  doubled = lambda norm: 2 * norm.weight.repeat(model.config.hc_count) - 1
  put(model, mix_weight_down_weight=0, mix_weight_up_weight=0, inject_weight_weight=0,
      attn_hyper_connection_hc_norm_weight=lambda i: doubled(plain.model.layers[i].input_layernorm),
      mlp_hyper_connection_hc_norm_weight=lambda i: doubled(plain.model.layers[i].post_attention_layernorm),
      hyper_connection_mixer_hc_norm_weight=lambda _: doubled(plain.model.norm))
  return model


def check_neutral(check, options):
  plain = tiny(**options)
  for what, model in neutral(options):
    check(f"{options}: {what} is plain", same(model, plain))
  for arch in model_dir.ARCHITECTURES.keys() - {"gpt2"}:
    other = tiny(arch, plain, **options)
    check(f"{options}: random {arch} is plain only if it is plain", same(other, plain) == (arch == "llama"))


def check_fresh(check):
  """New models start as plain LLaMA, in the architectures that promise it."""
  for arch, more in (("denseformer", {}), ("attnres", {"attn_res_block_size": 0}), ("attnres", {}),
                     ("mudd", {"norm": "none"}), ("mudd", {}),
                     ("hyper", {"prenorm": "rmsnorm"}), ("hyper", {"prenorm": "rmsnorm", "layer_index": "sublayer"})):
    config = tiny(arch, **more).config
    model = model_dir.ARCHITECTURES[arch](dataclasses.replace(config, rms_norm_eps=1e-12)).double()
    llama = tiny(rms_norm_eps=1e-12)
    llama.load_state_dict(model.state_dict(), strict=False)
    put(llama, layernorm_weight=1)
    check(f"a new {arch} {more} is LLaMA", same(model, llama, rtol=1e-6))
  for arch, bound in (("lime_static", 1 / 8), ("lime_dynamic", 1 / 8)):  # 1 / sqrt(K * D * C) = 1 / 8 with K * D = C
    config = tiny(arch, K=4).config
    for kv_init, limit in (("literal", bound), ("fan_in", 8**-0.5)):
      model = model_dir.ARCHITECTURES[arch](dataclasses.replace(config, kv_init=kv_init))
      largest = max(model.model.layers[i].self_attn.k_proj.weight.abs().max().item() for i in range(1, L))
      check(f"a new {arch} {kv_init}: keys within {limit}", 0.9 * limit < largest <= limit)
  for more, own, limit in (({}, "identity", (3 / 8) ** 0.5), ({"router_init": "random"}, "noise", (3 / 8) ** 0.5),
                           ({"router_bound": "literal"}, "identity", 6**0.5)):  # 2 layers of 4 heads
    model = model_dir.ARCHITECTURES["lime"](dataclasses.replace(tiny("lime", K=4).config, **more))
    router = model.model.layers[1].self_attn.lime_router.weight
    identity = torch.equal(router[:, 4:], torch.eye(4, dtype=router.dtype))
    check(f"a new lime {more}: its own block is the {own}", identity == (own == "identity"))
    check(f"a new lime {more}: its router within {limit:.3f}", 0.5 * limit < router[:, :4].abs().max().item() <= limit)
  config = tiny("hyper").config
  torch.manual_seed(1)
  whole = model_dir.ARCHITECTURES["hyper"](config)
  torch.manual_seed(1)
  scaled = model_dir.ARCHITECTURES["hyper"](dataclasses.replace(config, output_init_scale=True))
  for part in ("self_attn.o_proj", "mlp.down_proj"):
    a, b = (model.get_submodule(f"model.layers.1.{part}").weight for model in (whole, scaled))
    check(f"output_init_scale halves {part} with four streams", torch.allclose(a, 2 * b))


def check_lime(check, options):
  static, dynamic = (tiny(arch, **options) for arch in ("lime_static", "lime_dynamic"))
  dynamic.load_state_dict(static.state_dict(), strict=False)
  put(static, lime_router_weight=0)
  put(dynamic, lime_router_proj_weight=0)
  check(f"{options}: lime_dynamic with a projection of 0 is lime_static with even weights", same(dynamic, static))
  unpruned = tiny("lime_static", **options)
  check(f"{options}: lime_static with top_p nearly 1 prunes nothing",
        same(tiny("lime_static", top_p=1 - 1e-9, **options), unpruned))
  check(f"{options}: lime_static with top_p 0.5 prunes", not same(tiny("lime_static", top_p=0.5, **options), unpruned))
  pruned, kept = (tiny("lime_static", top_p=0.5, top_p_renormalize=on, **options) for on in (True, False))
  check(f"{options}: renormalising matters", not same(pruned, kept))
  for layer in pruned.model.layers[1:]:
    weight = layer.self_attn.lime_router.weight
    weight[~keep_top(weight.softmax(-1), 0.5)] = NEVER
    layer.self_attn.lime_router.top_p = 1.0
  check(f"{options}: renormalised, what is kept is a softmax of its own",
        same(tiny("lime_static", top_p=0.5, **options), pruned))
  weights = torch.rand(6, 9, dtype=torch.float64).softmax(-1)
  kept = keep_top(weights, 0.0)
  check("top-p 0 keeps the largest", bool((kept == (weights == weights.amax(-1, keepdim=True))).all()))
  kept = keep_top(torch.tensor([[0.25, 0.25, 0.125, 0.125, 0.25]]), 0.25).int().tolist()
  check("top-p keeps the one that passes p, and of equals the later ones", kept == [[0, 1, 0, 0, 1]])


def check_hyper(check, options):
  static = tiny("hyper", dynamic=False, **options)
  dynamic = put(tiny("hyper", static, **options), alpha_scale=0, beta_scale=0)
  check(f"{options}: dynamic hyper with scales 0 is static", same(dynamic, static))
  model, permuted = tiny("hyper", **options), tiny("hyper", **options)
  order = torch.tensor([2, 0, 3, 1])
  columns = torch.cat([torch.tensor([0]), 1 + order])
  for name, parameter in permuted.named_parameters():
    if name.endswith("static_alpha"):
      parameter.copy_(parameter[order][:, columns])
    elif name.endswith("static_beta"):
      parameter.copy_(parameter[order])
    elif name.endswith("alpha_proj"):
      parameter.copy_(parameter[:, columns])
  check(f"{options}: the order of hyper's streams does not matter", same(model, permuted))


def check_norms(check):
  """Hyper-connections' norms of a vector so short that its epsilon counts."""
  x = torch.tensor([[0.002, -0.001, 0.004, 0.003]], dtype=torch.float64)
  variance, square = x.var(unbiased=False), x.square().mean()
  wanted = {"layernorm": (x - x.mean()) / (variance + 1e-5).sqrt(), "rmsnorm": x / (square + 1e-6).sqrt()}
  wanted["layernorm_no_affine"] = wanted["layernorm"]
  for name, want in wanted.items():
    check(f"the epsilon of hyper's {name}", torch.allclose(hyper.NORMS[name](4).double()(x), want, rtol=1e-12))
  config = dataclasses.replace(tiny("hyper").config, norm="rmsnorm", dynamic_norm_eps=0.25)
  norm = hyper.HyperConnection(config, 0).norm
  check("hyper's dynamic_norm_eps", norm.eps == 0.25 and isinstance(norm, type(hyper.NORMS["rmsnorm"](4))))


def check_skip(check, options):
  """In ALA with stride 3 heads 1 and 3 of the last layer read the first, in SLA heads 0 and 1: only an order apart."""
  ala, sla = tiny("ala", stride=3, **options), tiny("sla", **options)
  sla.load_state_dict(ala.state_dict())
  D, order = ala.config.head_dim, torch.tensor([1, 3, 0, 2])
  rows = (order[:, None] * D + torch.arange(D)).flatten()
  for layer in sla.model.layers:
    for proj in ("q_proj", "k_proj", "v_proj"):
      weight = layer.self_attn.get_submodule(proj).weight
      weight.copy_(weight[rows])
    layer.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight[:, rows])
  check(f"{options}: ala and sla with their heads in another order are the same", same(ala, sla))


@torch.enable_grad()
def check_unread(check):
  """Key/value heads that no head reads have no gradient, all others have one."""
  for arch, more, unread in (("ala", {}, {3: [1, 3]}), ("ala", {"stride": 1}, {3: [1, 2, 3]}),
                             ("sla", {}, {3: [0, 1]}), ("sla", {"distance": 2, "heads": 1}, {2: [0], 3: [0]})):
    model = tiny(arch, K=4, **more)
    model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    for i, layer in enumerate(model.model.layers):
      dead = [head for head, d in enumerate(layer.self_attn.v_proj.weight.grad.split(2)) if bool((d == 0).all())]
      want = unread.get(i, [])
      check(f"{arch} {more}: layer {i} does not read its heads {want}, got {dead}", dead == want)


def check_mudd(check, options):
  """Without its dynamic part and with the same mixture for all ways, MUDDFormer is DenseFormer."""
  dense = tiny("denseformer", **options)
  mudd = put(tiny("mudd", dense, norm="none", **options), da_w2_weight=0)
  for i, layer in enumerate(mudd.model.layers):
    layer.da.static_weight.copy_(dense.model.dwa_modules["alphas"][str(i)].weight.expand_as(layer.da.static_weight))
    for way in "qkv":
      layer.get_submodule(f"input_layernorm_{way}").weight.copy_(dense.model.layers[i].input_layernorm.weight)
  check(f"{options}: mudd with one static mixture is denseformer", same(mudd, dense))


def check_vertical(check, options):
  learned = tiny("vertical", **options)
  allowed = {"unet": ([0], [1], [1, 2], [0, 3]), "inet": ([0], [0, 1], [0, 1, 2], [0, 1, 3])}
  for name, sources in allowed.items():
    fixed = tiny("vertical", learned, map=name, **options)
    put(learned, scores=lambda i: torch.tensor([0.0 if m in sources[i] else NEVER for m in range(i + 1)]))
    check(f"{options}: vertical {name} is learned with {sources}", same(learned, fixed))
  silent = put(tiny("vertical", **options), o_proj_weight=0)
  check(f"{options}: without residuals nothing passes silent attention",
        bool((silent(TOKENS) == 0).all()) == (not options["residual"]))
  scores = tiny("vertical", **options)
  moved = tiny("vertical", **options)
  for layer in moved.model.layers:
    layer.vertical_attention.scores += 3
  check(f"{options}: vertical scores may all move", same(scores, moved))


def check_moda(check, options):
  """A window of all lower layers is none; what a smaller one, or another option, cuts off counts for something."""
  all_below = tiny("moda", **options)
  widest = tiny("moda", all_below, depth_window=L - 1, **options)
  check(f"{options}: moda with a window of all lower layers has none", same(widest, all_below))
  for cut in ({"depth_window": L - 2}, {"ffn_kv": False}, {"depth_start": 2}):
    check(f"{options}: moda's {cut} matters", not same(tiny("moda", all_below, **cut, **options), all_below))


def check_resformer(check, options):
  plus = tiny("resformer", **options)
  manager = plus.model.lambda_manager
  first = manager.lambda_scale * manager.lambda_logits.exp() / manager.lambda_logits.exp().sum()
  own = [layer.self_attn.value_residual_mixing.lambda2 for layer in plus.model.layers[1:]]
  learnable = lambda a, b: put(tiny("resformer", plus, variant="learnable", **options), lambda1=a, lambda2=b)
  wanted = {
    "plus": (lambda i: first[i - 1], lambda i: own[i - 1]),
    "identity": (0.5, 0.5),
    "constant": (2, 1),
    "svformer": (1, 0),
    "sparse": (lambda i: 5 * (i == 3), 1),  # three eighths of four layers is one
  }
  for variant, (a, b) in wanted.items():
    check(f"{options}: resformer {variant} is learnable with its numbers",
          same(tiny("resformer", plus, variant=variant, **options), learnable(a, b)))
  for variant, (a, b) in {**wanted, "sparse": (5, 1)}.items():
    value = lambda x, otherwise: lambda i: (x(i) if callable(x) else x) if i >= 2 else otherwise
    check(f"{options}: resformer {variant}, the last two layers",
          same(tiny("resformer", plus, variant=variant, last_k=2, **options), learnable(value(a, 0), value(b, 1))))


def check_satformer(check, options):
  gated = tiny("satformer", **options)
  gated.model.layers[1].self_attn.value_residual_mixing["alpha_proj"].weight.zero_()
  last = tiny("satformer", gated, last_k=2, **options)
  check(f"{options}: satformer of the last two layers is one with a gate of 0 before", same(last, gated))


def run(check):
  with torch.no_grad():
    for options in ({"K": 2}, {"K": 4}, {"K": 2, "qk_norm": True, "tied": False, "head_dim": 6}):
      check_neutral(check, options)
      check_lime(check, options)
      check_hyper(check, options)
      for residual in (True, False):
        check_vertical(check, {**options, "residual": residual})
      check_resformer(check, options)
      check_satformer(check, options)
      check_mudd(check, options)
      check_moda(check, options)
    check_neutral(check, {"K": 4, "backbone": "gpt2", "bias": False})
    check_neutral(check, {"K": 4, "backbone": "gpt2", "bias": False, "tied": False, "activation_function": "gelu",
                          "scale_attn_by_inverse_layer_idx": True})
    check_skip(check, {"K": 4})
    check_unread(check)
    check_norms(check)
    check_fresh(check)
