"""Engram's hash and gate of DeepSeek's TileKernels, in the places of ours in the reference's models.

Their kernels need a GPU; what is called is the PyTorch that they are checked against, which rounds its output to bf16
and is told here not to. How tokens before the first are looked back to is ours.
"""
import torch
from reference import engram as ours
from reference import model_dir

from . import common

ABOUT = "deepseek-ai/TileKernels"
ARCHITECTURES = "Engram on llama, hyper, mhc"
CHECKOUTS, PACKAGES = {"TileKernels": "36d9e45d38e204ebb87e6f6e833821eee0482fe5"}, ""


def load(root):
  global theirs
  common.use(root / "TileKernels/tile_kernels/torch")  # not the package, which imports its kernels
  import engram as theirs


def models():
  for arch in ("llama", "mhc", "hyper"):
    for options in common.crossed(engram_layers=([1], [0, 2]), engram_order=(3, 2), tied=(True, False), seed=range(2)):
      yield f"{arch}, Engram", dict(arch=arch, engram_heads=2, engram_rows=9, engram_pad_id=2, **options)


class Engram(ours.Engram):
  def forward(self, x, tokens, documents=None):
    assert documents is None, "TileKernels' hash knows no documents"
    order, hashed = len(self.hash.multipliers), self.hash
    before = [torch.cat([tokens.new_full((1, back), hashed.pad).expand(len(tokens), -1), tokens], 1)[:, : x.shape[1]]
              for back in range(order)]
    grams = torch.stack(before, -1).flatten(0, 1)  # (B*T, order)
    sizes = torch.tensor(hashed.primes).view(1, order - 1, hashed.heads)
    rows = theirs.engram_hash_ref(grams, torch.tensor([hashed.multipliers]), sizes, theirs.make_offsets(sizes))[0]
    streams = (x[:, :, None] if x.ndim == 3 else x).flatten(0, 1)
    kv = self.wkv(self.embed(rows).flatten(1)).unflatten(-1, (-1, x.shape[-1]))
    return theirs.engram_gate_ref(streams, kv[:, :-1], kv[:, -1], self.q_weight, self.k_weight, 1e-6,
                                  self.eps).view_as(x)


def build(config):
  module = model_dir.ARCHITECTURES[config.arch](config)
  for layer in module.model.layers:
    if layer.engram is not None:
      layer.engram.__class__ = Engram
  return module


def weights(config, w):
  return w
