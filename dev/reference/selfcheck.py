#!/usr/bin/env python3
"""Checks the references by themselves: tensors and sizes, golden values, and what must equal LLaMA or another setting.

Exit 0: all hold. 1: one does not. 77: skipped, PyTorch is not importable.
"""
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
try:
  import torch
  import torch.nn.functional as F
except ImportError:
  print("skipped: PyTorch is not importable")
  sys.exit(77)
from reference import combinations, golden, identities, model_dir, shapes
from reference.lime import Lime
from reference.llama import Llama, rotate, softcap
from reference.model_dir import windows

torch.set_num_threads(1)  # the models are tiny
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 5, 3, 0]])
failures = 0


def check(what, holds):
  global failures
  failures += not holds
  if not holds:
    print(f"FAILED: {what}")


def same(a, b):
  """Equal to rounding in double."""
  return torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def router(model, layer):
  return model.model.layers[layer].self_attn.lime_router.weight


def tiny(directory, **options):
  model_dir.make_tiny(directory, seed=5, **options)
  return model_dir.load(directory)


@torch.no_grad()
def check_routings(directory, options):
  """The routings against LLaMA and against full routing with the matrix they stand for."""
  L, K = 4, options["K"]
  backbone = tiny(directory, arch="llama", **options)
  shared = backbone.state_dict()

  def lime(**more):
    model = tiny(directory, arch="lime", **options, **more)
    model.load_state_dict(shared, strict=False)
    return model

  full = lime()
  check(f"{options}: full routing with noise differs from LLaMA", not same(full(TOKENS), backbone(TOKENS)))
  for i in range(1, L):
    router(full, i).copy_(torch.cat([torch.zeros(K, i * K), torch.eye(K)], dim=1))
  check(f"{options}: router [0 | I] is LLaMA", same(full(TOKENS), backbone(TOKENS)))
  for i in range(1, L):
    router(full, i).copy_(torch.cat([torch.eye(K).double()] * (i + 1), dim=1) / (i + 1))
  check(f"{options}: average is the router [I | ... | I] / l", same(full(TOKENS), lime(routing="average")(TOKENS)))
  cuts = (("last", 2, {2: [0], 3: [0, 1]}), ("first", 2, {3: [2]}), ("first", 1, {2: [1], 3: [1, 2]}))
  for routing, window, masked in cuts:
    model, cut = lime(routing=routing, window=window), lime()
    for layer, blocks in masked.items():
      for block in blocks:
        router(cut, layer)[:, block * K : (block + 1) * K] = 0
    check(f"{options}: {routing}-{window} is full with {masked} cut out", same(model(TOKENS), cut(TOKENS)))
  check(f"{options}: last-4 of 4 layers is full", same(lime(routing="last", window=4)(TOKENS), lime()(TOKENS)))
  check(f"{options}: first-4 of 4 layers is full", same(lime(routing="first", window=4)(TOKENS), lime()(TOKENS)))


def check_masked_gradient(directory):
  model = tiny(directory, arch="lime", routing="last", window=1)
  model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
  for i in range(1, 4):
    gradient = router(model, i).grad
    check(f"last-1, layer {i}: masked gradients are zero", bool((gradient[:, :-2] == 0).all()))
    check(f"last-1, layer {i}: the own block has a gradient", bool((gradient[:, -2:] != 0).all()))


def check_parts(directory):
  x = torch.randn(1, 2, 5, 6, dtype=torch.float64)
  pairs = torch.complex(x[..., :3], x[..., 3:])
  turned = pairs * torch.exp(1j * torch.arange(5)[:, None] * 50.0 ** (-torch.arange(3, dtype=torch.float64) / 3))
  turned = torch.cat((turned.real, turned.imag), dim=-1)
  check("rotate turns (j, j + D/2) as a complex number", same(rotate(x, torch.arange(5)[None], 50.0), turned))
  model = tiny(directory)
  targets = TOKENS.clone()
  targets[:, 2:] = -1
  check("targets of -1 do not count", same(model.loss(TOKENS, targets), model.loss(TOKENS[:, :2], TOKENS[:, :2])))
  check("a position does not see later ones", same(model(TOKENS)[:, :3], model(TOKENS[:, :3])))
  check_windows(directory, model)
  expected = [f"model.layers.{i}.self_attn.lime_router.weight" for i in range(1, 4)]
  for routing, names in (("full", expected), ("average", [])):
    model = tiny(directory, arch="lime", routing=routing)
    check(f"{routing} stores {names}", [name for name in model.state_dict() if "lime" in name] == names)
  fresh = Lime(model_dir.make_tiny(directory, arch="lime").config)
  check("a new router ends in the identity", torch.equal(router(fresh, 3)[:, -2:], torch.eye(2)))
  check("a new model is LLaMA's kind", isinstance(fresh, Llama) and fresh(TOKENS).isfinite().all().item())


def check_cap(directory):
  """Capped logits against their formula, and the z-loss against PyTorch's derivative of it: 2 zeta lse p."""
  plain, capped = tiny(directory), tiny(directory, final_logit_softcapping=0.5)
  with torch.no_grad():
    check("a cap of 0.5 is 0.5 tanh(2 z)", same(capped(TOKENS), 0.5 * torch.tanh(2 * plain(TOKENS))))
  targets = TOKENS.clone()
  targets[0, 2] = -1
  lse = capped(TOKENS)[targets >= 0].logsumexp(-1)
  check("the z-loss is zeta times the mean of lse^2",
        same(capped.loss(TOKENS, targets, z_loss=0.3), capped.loss(TOKENS, targets) + 0.3 * lse.square().mean()))
  z = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
  lse = softcap(z, 2).logsumexp(-1)
  gradient, = torch.autograd.grad((F.cross_entropy(softcap(z, 2), TOKENS[0, :3]) + 0.3 * lse.square().mean()), z)
  p = softcap(z, 2).softmax(-1) * (1 + 2 * 0.3 * lse[:, None]) - F.one_hot(TOKENS[0, :3], 7)
  check("its gradient is the formula of kernels/block/cross_entropy.h",
        same(gradient, p * (1 - (softcap(z, 2) / 2) ** 2) / 3))


def check_windows(directory, plain):
  tokens, other = torch.arange(7)[None], torch.tensor([[6, 1, 2, 3, 4, 5, 6]])
  for pattern, reach in (("SSSS", 4), ("SLSS", 6)):
    model = tiny(directory, **windows(pattern, 2))
    changed = [not same(a, b) for a, b in zip(model(tokens)[0], model(other)[0])]
    check(f"windows of two tokens in {pattern} reach {changed}", changed == [at <= reach for at in range(7)])
  whole = tiny(directory, **windows("SSSS", 7))
  check("a window as long as the row changes nothing", same(whole(tokens), plain(tokens)))
  alone = tiny(directory, **windows("SSSS", 1))
  check("in a window of one token stands each alone", same(alone(tokens)[0], alone(tokens.T)[:, 0]))


def check_documents(directory):
  """A row of two documents against each in a row of its own."""
  engram = {"engram_layers": [0, 2], "engram_heads": 2, "engram_rows": 5}
  for options in ({}, windows("SLSL", 2), {"arch": "gpt2", "K": 4, "max_position_embeddings": 9}, engram,
                  {"arch": "lime", **engram, "engram_order": 6, "engram_width": 20},
                  {"arch": "moda", **windows("LSLS", 2)}):
    model = tiny(directory, **options)
    got = model(TOKENS, torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]))
    want = torch.cat([model(TOKENS[:1, :2]), model(TOKENS[:1, 2:])], dim=1)
    check(f"{options}: documents in a row are not what they are alone", same(got[:1], want))
    check(f"{options}: a row that is one document is another one", same(got[1:], model(TOKENS[1:])))
    check(f"{options}: documents make no difference", not same(model(TOKENS)[:1], want))


def check_configs(directory):
  """Options travel through config.json; what nobody knows is an error that names it."""
  for options in ({"arch": "mudd", "norm": "none", "intermediate_sizes": [3, 5, 6, 10]}, {"arch": "hyper", "rate": 2},
                  {"arch": "vertical", "residual": False, "qk_norm": True, "qk_norm_eps": 1e-2}, windows("SLLS", 3),
                  {"arch": "lime", **windows("LSSL", 3)}, {"arch": "llama", "final_logit_softcapping": 15.0}):
    written = model_dir.make_tiny(directory, **options).config
    check(f"{options} is read as written", model_dir.load(directory).config == written)
  path = pathlib.Path(directory) / "config.json"
  for none in ("0", "0.0", "null"):
    path.write_text(path.read_text().replace("15.0", none))
    check(f"final_logit_softcapping {none} is none", model_dir.load(directory).config.final_logit_softcapping == 0)
    path.write_text(path.read_text().replace(f'softcapping": {none}', 'softcapping": 15.0'))
  model_dir.make_tiny(directory, arch="satformer")
  written = path.read_text()
  for old, new in (('"gate"', '"window"'), ('"satformer"', '"satformers"'), ('"relu"', '"relus"')):
    path.write_text(written.replace(old, new))
    try:
      model_dir.load(directory)
      complaint = ""
    except ValueError as error:
      complaint = str(error)
    check(f"{new} in config.json is refused: {complaint!r}", new.strip('"') in complaint)


with tempfile.TemporaryDirectory() as directory:
  for K in (2, 4):
    check_routings(directory, {"K": K})
    check_routings(directory, {"K": K, "qk_norm": True, "tied": False, "head_dim": 6})
  check_masked_gradient(directory)
  check_parts(directory)
  check_cap(directory)
  check_documents(directory)
  check_configs(directory)
for module in (shapes, golden, identities, combinations):
  module.run(check)
print("the references are wrong" if failures else "the references agree with each other and with their specifications")
sys.exit(1 if failures else 0)
