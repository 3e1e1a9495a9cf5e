"""routing.json against a second computation of every map and curve, from the weights and the dumped values.

dump: *
architectures: lime lime_static lime_dynamic vertical hyper denseformer mudd resformer satformer relay sla ala
"""
import json
import math
import pathlib
import sys

import numpy as np

from values import Comparison, read, tensors


# The model's directory, or the newest checkpoint of a run's.
def model_dir(path):
  steps = sorted(p for p in pathlib.Path(path).glob("step_*") if (p / "config.json").is_file())
  return steps[-1] if steps else pathlib.Path(path)


class Model:

  def __init__(self, directory):
    self.values, found = read(directory, "routing")
    self.found, = found["models"]
    where = model_dir(self.found["model"])
    self.weights = tensors(where / "model.safetensors")
    config = json.loads((where / "config.json").read_text())
    self.options = config.get("crossply", {})
    self.L, self.H = config["num_hidden_layers"], config["num_attention_heads"]
    self.K = config["num_key_value_heads"]
    lengths = self.values["lengths"]
    self.counts = np.arange(self.values["tokens"].shape[1])[None] < lengths[:, None]  # (N, T)

  def layer(self, l, rest):
    return self.weights[f"model.layers.{l}.{rest}"]

  # The rows of all tokens that count.
  def rows(self, name):
    return self.values[name][self.counts]

  def mean(self, name):
    return self.rows(name).mean(0)


def triangle(L):
  return np.full((L, L), np.nan)


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def lime(m):
  layers, heads = triangle(m.L), [triangle(m.L) for _ in range(m.K)]
  for l in range(m.L):
    W = np.eye(m.K) if l == 0 else m.layer(l, "self_attn.lime_router.weight")
    blocks = np.abs(W).reshape(m.K, l + 1, m.K)
    layers[l, :l + 1] = blocks.mean((0, 2)) / blocks.mean((0, 2)).sum()
    for h in range(m.K):
      heads[h][l, :l + 1] = blocks[h].sum(1) / blocks[h].sum()
  return {"layer_map": layers} | {f"head_map.{h}": map for h, map in enumerate(heads)}, {}, {}


def lime_static(m):
  L, K = m.L, m.K
  routers, by_head = [triangle(L) for _ in range(K)], np.full((L, K), np.nan)
  mean, expected, pruned = triangle(L), np.zeros(L), 0
  for l in range(1, L):
    dynamic = m.values[f"route.{l}"].ndim == 4
    p = m.mean(f"route.{l}") if dynamic else m.values[f"route.{l}"]
    for h in range(K):
      routers[h][l, :l + 1] = p[h]
    by_head[l], mean[l, :l + 1] = p[:, l], p.mean(0)
    Wo = m.layer(l, "self_attn.o_proj.weight")
    norms = np.linalg.norm(Wo.reshape(Wo.shape[0], m.H, -1), axis=(0, 2))
    shares = (norms / norms.sum()).reshape(K, -1).sum(1)
    expected[l] = shares @ (p @ np.arange(l + 1))
    if not dynamic:
      for row in softmax(m.layer(l, "self_attn.lime_router.weight")):
        order = np.argsort(-row[::-1], kind="stable")  # of equal ones the later stream
        pruned += int((np.cumsum(row[::-1][order]) - row[::-1][order] > 0.9).sum())
  with_self = [np.mean([mean[l, s] for l in range(max(1, s), L)]) if L > 1 else np.nan for s in range(L)]
  without = [np.mean([mean[l, s] for l in range(s + 1, L)]) if s + 1 < L else np.nan for s in range(L)]
  maps = {"mean_retrieval": mean, "self_retrieval_by_head": by_head}
  maps |= {f"router_map.{h}": map for h, map in enumerate(routers)}
  curves = {"self_retrieval": np.diag(mean), "expected_stream": expected, "retrieved_with_self": with_self,
            "retrieved_without_self": without}
  return maps, curves, {} if m.found["arch"] == "lime_dynamic" else {"pruned": pruned}


def vertical(m):
  L = m.L
  alpha, tilde = triangle(L), triangle(L)
  norms = np.stack([np.sqrt((m.rows(f"hidden.{i}")**2).sum(-1) + 1e-12) for i in range(L)], -1)  # (tokens, L)
  for l in range(L):
    alpha[l, :l + 1] = softmax(m.layer(l, "vertical_attention.scores"))
    tilde[l, :l + 1] = softmax(np.log(alpha[l, :l + 1]) - np.log(norms[:, :l + 1])).mean(0)
  entropy = lambda map: -np.nansum(map * np.log(map), -1)
  return {"alpha": alpha, "tilde": tilde}, {"row_entropy.alpha": entropy(alpha), "row_entropy.tilde": entropy(tilde)}, {
      "entropy.alpha": entropy(alpha).mean(), "entropy.tilde": entropy(tilde).mean(),
      "entropy.most": math.log(math.factorial(L)) / L}


# With matrices in place of loops: the streams of all tokens as sums of outputs, (tokens, E, 2L+1).
def hyper(m):
  S = 2 * m.L
  tokens, E = int(m.counts.sum()), m.values["attn_mixing.0"].shape[2]
  streams = np.zeros((tokens, E, S + 1))
  streams[:, :, 0] = 1
  c = np.full((S + 1, S + 1), np.nan)
  for s in range(S):
    mixing = m.rows(f"{'mlp' if s % 2 else 'attn'}_mixing.{s // 2}")  # (tokens, E, E+2)
    c[s, :s + 1] = np.einsum("ni,nit->t", mixing[:, :, 0], streams)[:s + 1] / tokens
    streams = np.einsum("nki,nkt->nit", mixing[:, :, 1:E + 1], streams)
    streams[:, :, s + 1] = mixing[:, :, E + 1]
  c[S] = streams.mean((0, 1))
  readers, outputs = np.arange(S + 1) // 2, (np.arange(S + 1) + 1) // 2
  folded = np.full((m.L + 1, m.L + 1), np.nan)
  for r in range(m.L + 1):
    for j in range(m.L + 1):
      block = c[readers == r][:, outputs == j]
      if not np.isnan(block).all():
        folded[r, j] = np.nanmean(block)
  return {"coefficients": c, "layers": folded}, {}, {}


def denseformer(m):
  k, p = m.options.get("dilation", 1), m.options.get("period", 1)
  rows = np.full((m.L + 1, m.L + 1), np.nan)
  for i in range(m.L + 1):
    if i == 0 or i % p:
      rows[i, i] = 1
    else:
      rows[i, i % k:i + 1:k] = m.weights[f"model.dwa_modules.alphas.{i - 1}.weight"][0]
  return {"weights": rows}, {}, {}


def mudd(m):
  maps = {f"{what}.{way}": np.full((m.L + 1, m.L + 1), np.nan)
          for what in ("mean", "spread") for way in ("query", "key", "value", "stream")}
  for i in range(m.L):
    base = m.layer(i, "da.static_weight")
    w = m.rows(f"route.{i}").reshape(-1, *base.shape) + base
    for c, way in enumerate(("query", "key", "value", "stream") if len(base) == 4 else ("stream",)):
      maps[f"mean.{way}"][i + 1, :i + 2], maps[f"spread.{way}"][i + 1, :i + 2] = w[:, c].mean(0), w[:, c].std(0)
  return maps, {}, {}


# The weights that make what attention reads of the two values, by least squares.
def resformer(m):
  first, own = [np.nan], [1.0]
  for l in range(1, m.L):
    sources = np.stack([m.rows(f"own_value.{s}").ravel() for s in (0, l)], 1)
    a, b = np.linalg.lstsq(sources, m.rows(f"value.{l}").ravel(), rcond=None)[0]
    first.append(a), own.append(b)
  return {}, {"first": first, "own": own}, {}


def gates(m):
  return {}, {"mean_gate": [m.mean(f"gate.{l}").mean() if f"gate.{l}" in m.values else np.nan
                            for l in range(m.L)]}, {}


def skips(m):
  reads, shares = np.full((m.L, m.H), np.nan), np.tril(np.zeros((m.L, m.L))) + np.triu(np.full((m.L, m.L), np.nan), 1)
  for l in range(m.L):
    value = np.repeat(m.rows(f"value.{l}"), m.H // m.values[f"value.{l}"].shape[2], 1)
    for s in range(l + 1):
      same = (value == np.repeat(m.rows(f"own_value.{s}"), m.H // m.K, 1)).all((0, 2))
      reads[l, same], shares[l, s] = s, same.mean()
  return {"layer_read": reads, "share_of_heads": shares}, {}, {}


def main(directory):
  m = Model(directory)
  kinds = {"lime_dynamic": lime_static, "satformer": gates, "relay": gates, "sla": skips, "ala": skips}
  maps, curves, numbers = kinds.get(m.found["arch"], globals().get(m.found["arch"]))(m)
  # A mixture's numbers are sums in single precision.
  compare = Comparison(absolute=1e-7)
  compare.true("the same maps", set(maps) == set(m.found["maps"]))
  compare.true("the same curves", set(curves) == set(m.found["curves"]))
  finite = lambda rows: [[np.nan if x is None else x for x in row] for row in rows]
  for name, want in maps.items():
    compare.same(name, finite(m.found["maps"][name]["rows"]), want)
  for name, want in curves.items():
    compare.same(name, finite([m.found["curves"][name]["y"]])[0], want)
  for name, want in numbers.items():
    compare.same(name, m.found["numbers"][name], want)
  compare.end()


if __name__ == "__main__":
  main(sys.argv[1])
