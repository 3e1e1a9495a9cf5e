"""Whole models against numbers that another implementation computed in double: losses and gradients of one sentence.

The models have L = 4 layers, every weight a sine of its indices, the tensor's code and its layer's number:
fill(code, kind, n)[i, j] with i counting inputs and j outputs, so that linear weights are its transpose.
"""
import re

import torch

from .attnres import Attnres
from .denseformer import Denseformer
from .depth_attention import DepthAttention
from .gated_streams import GatedStreams
from .hyper import Hyper
from .kv_share import KvShare
from .llama import Llama
from .mhc import Mhc
from .moda import Moda
from .mudd import Mudd
from .satformer import GATES, Satformer
from .shortcuts import Shortcuts
from .vertical import Vertical

SENTENCE = torch.tensor([[3, 1, 4, 1, 5]])
KINDS = {"M": (0.0, 0.4), "G": (1.0, 0.2), "H": (0.5, 0.2)}  # offset and amplitude of the sine

# Code and kind of each tensor, by the end of its name.
LINEAR = {
  "q_proj": 3, "k_proj": 4, "v_proj": 5, "o_proj": 6, "gate_proj": 7, "up_proj": 8, "down_proj": 9, "alpha_proj": 14,
  "w1": 22, "w2": 23, "depth_k_proj": 75, "depth_v_proj": 76,
}
STORED = {"self_attention_res_proj": 52, "mlp_res_proj": 54, "ve_gate": 61}  # as they lie in the file, not transposed
GAINS = {
  "input_layernorm": 10, "post_attention_layernorm": 11, "q_norm": 12, "k_norm": 13,
  "input_layernorm_q": 19, "input_layernorm_k": 20, "input_layernorm_v": 21,
  "self_attention_res_norm": 53, "mlp_res_norm": 55, "depth_k_norm": 77,
}
HYPER = {  # of attn_hc; those of mlp_hc are 8 larger
  "static_beta": (27, "M"), "static_alpha": (28, "M"), "dynamic_beta_proj": (29, "M"),
  "dynamic_alpha_proj": (30, "M"), "dynamic_beta_scale": (31, "M"), "dynamic_alpha_scale": (32, "M"),
  "norm.weight": (33, "G"), "norm.bias": (34, "M"),
}
MHC = {  # model-level names without their hc_
  "attn_hc.fn": (43, "M"), "attn_hc.base": (44, "M"), "attn_hc.scale": (45, "H"),
  "ffn_hc.fn": (46, "M"), "ffn_hc.base": (47, "M"), "ffn_hc.scale": (48, "H"),
  "hc_head.fn": (49, "M"), "hc_head.base": (50, "M"), "hc_head.scale": (51, "H"),
}
GATED = {  # of attn_; those of mlp_ are 4 larger, of the model 8
  "hc_norm": (63, "M"), "input_mix_weight_down": (64, "M"), "input_mix_weight_up": (65, "M"),
  "block_inject_weight": (66, "M"),
}
SHORTCUTS = {"model.resid_lambdas": (58, "G"), "model.x0_lambdas": (59, "M"), "model.backout_lambda": (62, "M")}


def fill(code, kind, n, shape, row=0):
  i, j = torch.arange(row, row + shape[0]).double()[:, None], torch.arange(shape[1]).double()
  offset, amplitude = KINDS[kind]
  return offset + amplitude * torch.sin(1.7 * code + 0.9 * n + 0.7 * i + 1.3 * j + 0.37 * i * j)


def value(name, shape):
  """What the tensor of this name holds."""
  if name == "model.embed_tokens.weight":
    return fill(1, "M", 0, shape)
  if name == "model.norm.weight":
    return fill(2, "G", 0, (1, *shape))[0]
  if name == "model.output_attn_res_proj.weight":
    return fill(56, "M", 0, shape)
  if name == "model.output_attn_res_norm.weight":
    return fill(57, "G", 0, (1, *shape))[0]
  if match := re.fullmatch(r"model\.dwa_modules\.alphas\.(\d+)\.weight", name):
    return fill(18, "M", int(match[1]) + 1, shape)
  if name in SHORTCUTS:
    return fill(*SHORTCUTS[name], 0, (1, *shape))[0]
  if match := re.fullmatch(r"model\.value_embeds\.(\d+)\.weight", name):
    return fill(60, "M", int(match[1]) + 1, shape)
  if match := re.fullmatch(r"model\.(?:layers\.(\d+)\.)?((?:attn_hc|ffn_hc|hc_head)\.)(?:hc_)?(fn|base|scale)", name):
    two = shape if len(shape) == 2 else (1, *shape)
    return fill(*MHC[match[2] + match[3]], int(match[1] or -1) + 1, two).reshape(shape)
  if match := re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(attn_|mlp_|)hyper_connection(?:_mixer)?\.(\w+)\.weight", name):
    code, kind = GATED[match[3]]
    two = shape if len(shape) == 2 else (1, *shape)
    return fill(code + {"attn_": 0, "mlp_": 4, "": 8}[match[2]], kind, int(match[1] or -1) + 1, two).reshape(shape)
  layer, rest = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name).groups()
  n = int(layer) + 1
  if match := re.fullmatch(r"(attn|mlp)_hc\.(.*)", rest):
    code, kind = HYPER[match[2]]
    column = match[2] == "dynamic_beta_proj"  # a vector over the inputs
    two = shape if len(shape) == 2 else (*shape, 1) if column else (1, *shape)
    return fill(code + 8 * (match[1] == "mlp"), kind, n, two).reshape(shape)
  if match := re.fullmatch(r"da\.(pre|post)_da_norms\.(\d+)\.weight", rest):
    code, kind = {"pre": (25, "G"), "post": (26, "H")}[match[1]]
    return fill(code, kind, n, (1, *shape), row=int(match[2]))[0]
  if rest == "da.static_weight":
    return fill(24, "M", n, shape)
  if rest == "vertical_attention.scores":
    return torch.zeros(shape)
  part = rest.split(".")[-2]
  if part in STORED:
    return fill(STORED[part], "M", n, shape)
  return fill(LINEAR[part], "M", n, shape[::-1]).T if part in LINEAR else fill(GAINS[part], "G", n, (1, *shape))[0]


# Model, options, loss, norm of the whole gradient, and some of its entries.
L = "model.layers"
CASES = (
  (Llama, {}, 2.4329042095, 17.61264579, {
    ("model.embed_tokens.weight", 3, 0): -1.00880811, (f"{L}.0.self_attn.v_proj.weight", 0, 0): -0.645432875,
    (f"{L}.3.mlp.down_proj.weight", 3, 2): -0.128825324, (f"{L}.1.self_attn.q_norm.weight", 1): 0.0446031825}),
  (Satformer, {"gate": "relu"}, 2.3538606023, 19.05012873, {
    ("model.embed_tokens.weight", 3, 0): -1.34790532, (f"{L}.0.self_attn.v_proj.weight", 0, 0): -0.989452172,
    (f"{L}.1.self_attn.value_residual_mixing.alpha_proj.weight", 0, 0): -0.272334489,
    (f"{L}.3.self_attn.value_residual_mixing.alpha_proj.weight", 1, 5): 1.42658058}),
  (Satformer, {"gate": "softmax"}, 2.6166121013, 17.76708929, {
    ("model.embed_tokens.weight", 3, 0): -1.99753559, (f"{L}.0.self_attn.v_proj.weight", 0, 0): 0.441777278,
    (f"{L}.1.self_attn.value_residual_mixing.alpha_proj.weight", 0, 0): -0.00927837865,
    (f"{L}.3.self_attn.value_residual_mixing.alpha_proj.weight", 1, 5): -0.00427454930}),
  (Denseformer, {}, 2.0256778471, 4.66317073, {
    ("model.embed_tokens.weight", 3, 0): -0.843848637, ("model.dwa_modules.alphas.1.weight", 0, 0): -0.0275027484,
    ("model.dwa_modules.alphas.3.weight", 0, 4): 0.216333601}),
  (Mudd, {"norm": "none"}, 3.2047637262, 167.87104236, {
    ("model.embed_tokens.weight", 3, 0): 39.2574009, (f"{L}.0.da.w1.weight", 0, 0): -4.42988228,
    (f"{L}.1.da.w2.weight", 5, 3): 0.0666578147, (f"{L}.2.da.static_weight", 2, 1): -0.169929020}),
  (Hyper, dict(rate=2, norm="layernorm", prenorm="rmsnorm", layer_index="sublayer"), 2.2149817565, 206.51247999, {
    ("model.embed_tokens.weight", 3, 0): -13.7038215, (f"{L}.0.attn_hc.static_alpha", 0, 0): -0.000862170467,
    (f"{L}.1.mlp_hc.dynamic_alpha_proj", 0, 1): -0.433759789, (f"{L}.2.attn_hc.dynamic_beta_scale", 0): -0.830844147,
    (f"{L}.3.mlp_hc.norm.weight", 2): -0.0174313841}),
  (Attnres, {"attn_res_block_size": 0}, 2.6010179635, 21.20285061, {
    ("model.embed_tokens.weight", 3, 0): -1.11195588, (f"{L}.1.self_attention_res_proj.weight", 0, 0): -0.154031951,
    (f"{L}.0.mlp_res_proj.weight", 0, 3): -0.338918639, (f"{L}.2.mlp_res_norm.weight", 2): -5.00251425e-03,
    ("model.output_attn_res_proj.weight", 0, 1): -0.125315295}),
  (Attnres, {"attn_res_block_size": 2}, 2.4356873559, 9.92742253, {
    ("model.embed_tokens.weight", 3, 0): 0.952372688, (f"{L}.1.self_attention_res_proj.weight", 0, 0): 0.204281965,
    (f"{L}.0.mlp_res_proj.weight", 0, 3): -0.215888233, ("model.output_attn_res_norm.weight", 5): -0.127233087}),
  (KvShare, {}, 2.1737393533, 10.12992350, {
    ("model.embed_tokens.weight", 3, 0): -1.09675484, (f"{L}.0.self_attn.k_proj.weight", 0, 0): -0.586777329,
    (f"{L}.2.self_attn.v_proj.weight", 1, 2): 0.131682417, (f"{L}.3.self_attn.q_proj.weight", 0, 0): -2.86531428e-02}),
  (KvShare, {"sharing": "suffix", "num_kv_shared_layers": 2}, 2.1151151893, 10.17685860, {
    ("model.embed_tokens.weight", 3, 0): 0.239488616, (f"{L}.0.self_attn.k_proj.weight", 0, 0): -0.466687046,
    (f"{L}.1.self_attn.v_proj.weight", 1, 2): -0.474918947, (f"{L}.1.self_attn.k_norm.weight", 1): -0.217898971}),
  (DepthAttention, {}, 2.0797540984, 36.81622944, {
    ("model.embed_tokens.weight", 3, 0): -1.02268181, (f"{L}.0.self_attn.k_proj.weight", 0, 0): -3.11342952,
    (f"{L}.0.self_attn.v_proj.weight", 0, 0): 0.943134332, (f"{L}.2.self_attn.k_norm.weight", 1): 0.322029558}),
  (DepthAttention, {"depth_start": 2, "depth_stride": 4, "depth_recent": 1}, 2.2396225699, 23.67795428, {
    ("model.embed_tokens.weight", 3, 0): 1.46153145, (f"{L}.0.self_attn.v_proj.weight", 0, 0): -0.689040650,
    (f"{L}.2.self_attn.k_norm.weight", 1): 0.156400250,
    (f"{L}.3.self_attn.q_proj.weight", 0, 0): 0.0239485538}),
  (Moda, {}, 2.1323024272, 7.86028016, {
    ("model.embed_tokens.weight", 3, 0): 0.128234308, (f"{L}.0.self_attn.k_proj.weight", 0, 0): -0.443303513,
    (f"{L}.1.mlp.depth_k_proj.weight", 1, 2): 0.0329476600, (f"{L}.2.mlp.depth_v_proj.weight", 3, 5): -0.0707940004,
    (f"{L}.0.mlp.depth_k_norm.weight", 1): -0.109912408}),
  (Moda, {"depth_start": 2, "depth_window": 2, "ffn_kv": False}, 2.4199833470, 47.28471432, {
    ("model.embed_tokens.weight", 3, 0): -9.26832929, (f"{L}.0.self_attn.v_proj.weight", 0, 0): 1.45142862,
    (f"{L}.2.self_attn.k_norm.weight", 1): -0.0568016025,
    (f"{L}.3.self_attn.q_proj.weight", 0, 0): -0.0191149009}),
  (Moda, {"depth_start": 2, "depth_window": 1}, 2.4576039857, 32.61036726, {
    ("model.embed_tokens.weight", 3, 0): -0.688699635, (f"{L}.0.self_attn.k_proj.weight", 0, 0): -0.378200428,
    (f"{L}.1.mlp.depth_k_proj.weight", 1, 2): 0.493310531, (f"{L}.2.mlp.depth_k_norm.weight", 1): -0.191122222}),
  (Mhc, {}, 2.5399098016, 12.38162342, {
    ("model.embed_tokens.weight", 3, 0): 1.54674184, (f"{L}.0.attn_hc.fn", 0, 0): -1.72878376e-07,
    (f"{L}.1.ffn_hc.fn", 8, 3): 7.98159481e-04, (f"{L}.2.attn_hc.base", 9): -9.21372843e-04,
    (f"{L}.3.ffn_hc.scale", 2): 3.51471232e-03, ("model.hc_head.hc_base", 1): 7.49038008e-03}),
  (Mhc, {"reads": "previous"}, 2.6181199318, 10.00972531, {
    ("model.embed_tokens.weight", 3, 0): 0.636686564, (f"{L}.0.attn_hc.fn", 0, 0): 1.16395800e-02,
    (f"{L}.1.ffn_hc.fn", 8, 3): -2.08935869e-05, (f"{L}.3.ffn_hc.scale", 2): 6.25084323e-03}),
  (Mhc, {"mixing": "identity"}, 2.5098883033, 11.75236706, {
    ("model.embed_tokens.weight", 3, 0): 0.683588512, (f"{L}.1.ffn_hc.fn", 5, 3): 2.40725069e-04,
    (f"{L}.2.attn_hc.base", 7): 1.44189665e-03}),
  (Mhc, {"mixing": "permutations"}, 2.5271720638, 13.10586671, {
    ("model.embed_tokens.weight", 3, 0): 1.83114647, (f"{L}.1.ffn_hc.fn", 5, 3): -1.16354268e-04,
    (f"{L}.2.attn_hc.base", 7): 1.07236808e-02, (f"{L}.3.ffn_hc.base", 31): -2.63073887e-04}),
  (Shortcuts, {"gate_channels": 4}, 2.8793226593, 12.57702430, {
    ("model.embed_tokens.weight", 3, 0): -0.683985007, ("model.resid_lambdas", 2): 0.533011815,
    ("model.x0_lambdas", 1): -0.6895045, ("model.backout_lambda", 0): -3.58062367e-02,
    ("model.value_embeds.1.weight", 4, 1): 0.103738402, (f"{L}.3.self_attn.ve_gate.weight", 1, 2): -1.37159561e-03}),
  (GatedStreams, {"hc_lowrank": 3}, 2.1769939053, 2.92132476, {
    ("model.embed_tokens.weight", 3, 0): 0.136204142,
    (f"{L}.0.attn_hyper_connection.hc_norm.weight", 9): -2.59238522e-02,
    (f"{L}.1.mlp_hyper_connection.input_mix_weight_down.weight", 1, 5): 4.11184103e-04,
    (f"{L}.2.attn_hyper_connection.input_mix_weight_up.weight", 20, 2): -2.39800905e-03,
    (f"{L}.3.mlp_hyper_connection.block_inject_weight.weight", 2, 7): 1.81480009e-03,
    ("model.hyper_connection_mixer.hc_norm.weight", 3): 3.37504278e-03}),
)


def model_of(model_class, **options):
  config = model_class.config_class(
    vocab_size=7, hidden_size=8, intermediate_size=6, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=2, tie_word_embeddings=True, qk_norm=True, **options)
  model = model_class(config).double()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      parameter.copy_(value(name, tuple(parameter.shape)))
  return model


# The gates of SATFormer on one token's logits: alpha, and the gradient of the logits when that of alpha is given.
LOGITS, D_ALPHA = (-1.2, 0.3, 2.0, -0.1), (0.5, -1.0, 0.25, 2.0)
GATE_VALUES = {
  "relu": ((0, 0.3, 2, 0), (0, -1, 0.25, 0)),
  "sigmoid": ((0.231475, 0.574443, 0.880797, 0.475021), (0.088947, -0.244458, 0.026248, 0.498752)),
  "softmax": ((0.121145, 0.542933, 2.971984, 0.363939), (0.030634, -0.677107, 0.008535, 0.637938)),
  "softmax_sigmoid": ((0.028042, 0.311884, 2.617715, 0.172878), (0.003526, -0.539936, 0.210615, 0.463371)),
  "tanh": ((-0.833655, 0.291313, 0.964028, -0.099668), (0.152510, -0.915137, 0.017663, 1.980133)),
  "identity": (LOGITS, D_ALPHA),
}
# Vertical attention on one token with three sources: scores, h, the gradient of v; then v and the gradients of both.
SCORES, D_V = (0.5, -0.25, 1.0), (0.1, -0.2, 0.3, 0.4)
SOURCES = ((1, 2, -2, 0), (0.5, -1.5, 0, 2), (-3, 0, 4, 0))
V = (-0.66394461, 0.45824043, 0.76891202, 0.43679216)
D_SCORES = (-0.45081282, 0.19713568, 0.25367715)
D_SOURCES = ((0.08938204, 0.02159717, 0.01769456, 0.15716691), (0.00667533, 0.00181363, 0.06551882, 0.02670130),
             (0.06930992, -0.07773733, 0.07601765, 0.15547466))


def double(numbers):
  return torch.tensor(numbers, dtype=torch.float64)


def within(got, want, decimals):
  """Equal to so many printed decimals."""
  return torch.allclose(torch.as_tensor(got, dtype=torch.float64), double(want), rtol=0, atol=0.6 * 10.0**-decimals)


def check_models(check):
  for model_class, options, loss, norm, entries in CASES:
    what, model = f"golden {model_class.__name__} {options}", model_of(model_class, **options)
    got = model.loss(SENTENCE[:, :-1], SENTENCE[:, 1:])
    got.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    check(f"{what}: loss {got.item():.10f}, not {loss}", within(got.item(), loss, 10))
    total = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    check(f"{what}: gradient norm {total:.8f}, not {norm}", within(total, norm, 8))
    for (name, *index), want in entries.items():
      entry = gradients[name][tuple(index)].item()
      check(f"{what}: gradient {entry:.9g} of {name} {index}, not {want}", within(entry / want, 1, 8))


def check_parts(check):
  for name, (alpha, d_logits) in GATE_VALUES.items():
    logits = double(LOGITS).requires_grad_()
    got = GATES[name](logits)
    got.backward(double(D_ALPHA))
    check(f"golden gate {name}", within(got.detach(), alpha, 6) and within(logits.grad, d_logits, 6))
  attention = model_of(Vertical).model.layers[2].vertical_attention
  with torch.no_grad():
    attention.scores.copy_(double(SCORES))
  sources = [double(h)[None, None].requires_grad_() for h in SOURCES]
  v = attention(sources)
  v.backward(double(D_V)[None, None])
  check("golden vertical attention", within(v[0, 0].detach(), V, 8))
  check("golden vertical attention, d scores", within(attention.scores.grad, D_SCORES, 8))
  for h, d_h in zip(sources, D_SOURCES):
    check("golden vertical attention, d source", within(h.grad[0, 0], d_h, 8))


def run(check):
  check_models(check)
  check_parts(check)
