"""DenseFormer in PyTorch: after a block, a weighted sum of all outputs so far takes the place of the last one.

X_0 is the embeddings, X_n what block n = 1..L makes of its input. The next input is

  Y_n = sum over j in S_n of  weight[j] * X_j        where n is a multiple of `period`, otherwise X_n

S_n are the j <= n that differ from n by a multiple of `dilation`. The weights are free numbers, one for all tokens and
channels, and start as the plain model: 1 for X_n, 0 for the others.
"""
import dataclasses

import torch
from torch import nn

from .config import Config
from .llama import Backbone, Llama


@dataclasses.dataclass
class DenseformerConfig(Config):
  arch: str = "denseformer"
  dilation: int = 1
  period: int = 1

  def one_stream(self):
    return False


class DepthWeightedAverage(nn.Module):
  def __init__(self, n, dilation):
    super().__init__()
    self.sources = range(n % dilation, n + 1, dilation)
    self.weight = nn.Parameter(torch.eye(len(self.sources))[-1:])  # (1, sources)

  def forward(self, outputs):  # [X_0, ..., X_n], each (B, T, C)
    return torch.einsum("s,sbtc->btc", self.weight[0], torch.stack([outputs[j] for j in self.sources]))


class DenseformerBackbone(Backbone):
  def __init__(self, config, layer, attention):
    super().__init__(config, layer, attention)
    blocks = range(config.period, config.num_hidden_layers + 1, config.period)
    alphas = {str(n - 1): DepthWeightedAverage(n, config.dilation) for n in blocks}  # by layer, from 0
    self.dwa_modules = nn.ModuleDict({"alphas": nn.ModuleDict(alphas)})

  def forward(self, tokens, step):
    x = self.embed(tokens, step)
    outputs, alphas, shared = [x], self.dwa_modules["alphas"], self.begin(x, tokens)
    for i, layer in enumerate(self.layers):
      x, _, shared = layer(x, (), shared, step)
      outputs.append(x)
      x = alphas[str(i)](outputs) if str(i) in alphas else x
    return self.norm(x)


class Denseformer(Llama):
  config_class, backbone = DenseformerConfig, DenseformerBackbone
