"""SATFormer in PyTorch: later layers add the first layer's values to theirs, each head of each token by its own gate.

  V'_i[h] = V_i[h] + alpha[h] * V_0[h]        alpha = gate(alpha_proj(x))        i >= 1, layers from 0

x is what the layer's queries, keys and values are projected from; V_0 is as the first layer projects it. last_k > 0
says how many of the last layers have a gate; the others are ordinary.
"""
import dataclasses
import math

import torch.nn.functional as F
from torch import nn

from .config import Config, check_choice
from .llama import Attention, Llama

# Of the logits of one token's heads, in the last dimension. The softmax is scaled to a mean of 1.
GATES = {
  "relu": F.relu,
  "sigmoid": lambda z: z.sigmoid(),
  "softmax": lambda z: z.shape[-1] * z.softmax(-1),
  "softmax_sigmoid": lambda z: z.shape[-1] * z.softmax(-1) * z.sigmoid(),
  "tanh": lambda z: z.tanh(),
  "identity": lambda z: z,
}


@dataclasses.dataclass
class SatformerConfig(Config):
  arch: str = "satformer"
  gate: str = "relu"  # relu | sigmoid | softmax | softmax_sigmoid | tanh | identity
  last_k: int = 0
  gate_init: str = "normal"  # normal | uniform


class SatformerAttention(Attention):
  def __init__(self, config, layer):
    super().__init__(config, layer)
    check_choice("gate", config.gate, GATES)
    L = config.num_hidden_layers
    if layer > 0 and layer >= L - (config.last_k or L):
      check_choice("gate_init", config.gate_init, ("normal", "uniform"))
      alpha_proj = nn.Linear(config.hidden_size, config.num_key_value_heads, bias=False)
      self.value_residual_mixing = nn.ModuleDict({"alpha_proj": alpha_proj})

  def initialise(self):
    if self.config.gate_init == "uniform" and hasattr(self, "value_residual_mixing"):
      bound = 1 / math.sqrt(self.config.hidden_size)
      nn.init.uniform_(self.value_residual_mixing["alpha_proj"].weight, -bound, bound)

  def project(self, x, shared):
    q, k, v = super().project(x, shared)
    if hasattr(self, "value_residual_mixing"):
      alpha = GATES[self.config.gate](self.value_residual_mixing["alpha_proj"](x))  # (B, T, K)
      v = v + alpha.transpose(1, 2)[..., None] * shared[0]
    return q, k, v

  def keep(self, values, shared):
    return (values,) if self.layer == 0 else shared


class Satformer(Llama):
  config_class, attention = SatformerConfig, SatformerAttention
