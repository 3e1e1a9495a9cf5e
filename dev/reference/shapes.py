"""Names and shapes of what each architecture adds to LLaMA, and the published sizes of whole models."""
import tempfile

import torch

from . import model_dir
from .denseformer import Denseformer
from .hyper import Hyper
from .lime_static import LimeDynamic, LimeStatic
from .llama import Llama
from .moda import Moda
from .mudd import Mudd
from .resformer import Resformer
from .satformer import Satformer
from .vertical import Vertical

# Of make_tiny with K = 2: L = 4 layers, C = 8 channels.
L, C, K = 4, 8, 2


def per_layer(layers, **shapes):
  """{full name: shape}; a shape may be a function of the layer. In the keywords __ stands for a dot."""
  named = {}
  for i in layers:
    for name, shape in shapes.items():
      named[f"model.layers.{i}.{name.replace('__', '.')}"] = shape(i) if callable(shape) else shape
  return named


def hyper(E, dynamic=True, **norm):
  named = {}
  for hc in ("attn_hc", "mlp_hc"):
    shapes = {"static_alpha": (E, E + 1), "static_beta": (E,), **norm}
    if dynamic:
      shapes |= {"dynamic_alpha_proj": (C, E + 1), "dynamic_beta_proj": (C,),
                 "dynamic_alpha_scale": (1,), "dynamic_beta_scale": (1,)}
    named |= per_layer(range(L), **{f"{hc}__{name}": shape for name, shape in shapes.items()})
  return named


def mudd(prepost):
  named = {}
  for i in range(L):
    ways, sources = 4 if i < L - 1 else 1, i + 2
    named |= per_layer([i], input_layernorm_q__weight=(C,), input_layernorm_k__weight=(C,),
                       input_layernorm_v__weight=(C,), da__w1__weight=(ways * sources, C),
                       da__w2__weight=(ways * sources, ways * sources), da__static_weight=(ways, sources))
    if prepost:
      named |= per_layer([i], **{f"da__pre_da_norms__{l}__weight": (C,) for l in range(sources)})
      named |= per_layer([i], **{f"da__post_da_norms__{c}__weight": (C,) for c in range(ways)})
  return named


def mhc(E, M, groups):
  return per_layer(range(L), **{f"{hc}__{name}": shape for hc in ("attn_hc", "ffn_hc")
                                for name, shape in (("fn", (M, E * C)), ("base", (M,)), ("scale", (groups,)))})


MHC_HEAD = {"model.hc_head.hc_fn": (4, 4 * C), "model.hc_head.hc_base": (4,), "model.hc_head.hc_scale": (1,)}


def moda(layers):
  return per_layer(layers, mlp__depth_k_proj__weight=(2 * K, C), mlp__depth_v_proj__weight=(2 * K, C))


def shortcuts(layers, G):
  return {**per_layer(layers, self_attn__ve_gate__weight=(K, G)),
          **{f"model.value_embeds.{i}.weight": (7, 2 * K) for i in layers}}


def gated_read(R, E, inject):
  named = {"hc_norm": (E * C,), "input_mix_weight_down": (R, E * C), "input_mix_weight_up": (E * C, R)}
  return named | ({"block_inject_weight": (E, E * C)} if inject else {})


def gated_streams(R, E=4):
  return {**per_layer(range(L), **{f"{site}_hyper_connection__{name}__weight": shape for site in ("attn", "mlp")
                                   for name, shape in gated_read(R, E, True).items()}),
          **{f"model.hyper_connection_mixer.{name}.weight": shape for name, shape in gated_read(R, E, False).items()}}


SPEED_RUN = {"model.skip_weights": (2,), "model.lane_post": (L - 1, 2, 2), "model.lane_resid": (L - 1, 2),
             **{f"model.mudd_tail.{i}.{name}": shape for i in range(2)
                for name, shape in (("w1.weight", (5, C)), ("w2.weight", (3, 5)), ("bias", (3,)))}}
SCALARS = {"model.resid_lambdas": (L,), "model.x0_lambdas": (L,), "model.backout_lambda": (1,)}
NORMS = per_layer(range(L), input_layernorm__weight=(C,), post_attention_layernorm__weight=(C,))
ALL_NORMS = NORMS | {"model.norm.weight": (C,)}
INPUT_NORMS = per_layer(range(L), input_layernorm__weight=(C,))
LAMBDA = "self_attn__value_residual_mixing__lambda"
MANAGER = {"model.lambda_manager.lambda_scale": (1,), "model.lambda_manager.lambda_logits": (L - 1,)}
ALPHAS = "model.dwa_modules.alphas"

ATTNRES = {
  "model.output_attn_res_proj.weight": (1, C), "model.output_attn_res_norm.weight": (C,),
  **per_layer(range(L), self_attention_res_proj__weight=(1, C), self_attention_res_norm__weight=(C,),
              mlp_res_proj__weight=(1, C), mlp_res_norm__weight=(C,)),
}

GEMMA3N = {
  "model.embed_tokens_per_layer.weight": (7, 6 * L), "model.per_layer_model_projection.weight": (6 * L, C),
  "model.per_layer_projection_norm.weight": (6,),
  **per_layer(range(L), laurel__linear_left__weight=(3, C), laurel__linear_right__weight=(C, 3),
              laurel__post_laurel_norm__weight=(C,), per_layer_input_gate__weight=(6, C),
              per_layer_projection__weight=(C, 6), post_per_layer_input_norm__weight=(C,)),
}

# arch, options, what is added, what is missing.
ADDED = (
  ("lime", {}, per_layer(range(1, L), self_attn__lime_router__weight=lambda i: (K, (i + 1) * K)), {}),
  ("lime", {"routing": "average"}, {}, {}),
  ("lime_static", {}, per_layer(
    range(1, L), self_attn__lime_router__weight=lambda i: (K, i + 1), lime_layernorm__weight=(C,)), {}),
  ("lime_dynamic", {}, per_layer(
    range(1, L), self_attn__lime_router__proj__weight=lambda i: (K * (i + 1), C), lime_layernorm__weight=(C,)), {}),
  ("hyper", {}, hyper(4), NORMS),
  ("hyper", {"prenorm": "rmsnorm", "norm": "rmsnorm", "rate": 2}, hyper(2, norm__weight=(C,)), {}),
  ("hyper", {"norm": "layernorm"}, hyper(4, norm__weight=(C,), norm__bias=(C,)), NORMS),
  ("hyper", {"norm": "layernorm", "dynamic": False}, hyper(4, dynamic=False), NORMS),
  ("vertical", {}, per_layer(range(L), vertical_attention__scores=lambda i: (i + 1,)), {}),
  ("vertical", {"map": "unet"}, {}, {}),
  ("vertical", {"map": "inet", "residual": False}, {}, {}),
  ("sla", {}, {}, {}),
  ("depth_attention", {}, {}, {}),
  ("moda", {}, moda([0, 1, 2]), {}),
  ("moda", {"ffn_kv": False}, {}, {}),
  ("moda", {"depth_start": 4}, {}, {}),
  ("moda", {"depth_start": 3, "depth_window": 2}, moda([1, 2]), {}),
  ("moda", {"qk_norm": True}, moda([0, 1, 2]) | per_layer([0, 1, 2], mlp__depth_k_norm__weight=(2,)) | per_layer(
    range(L), self_attn__q_norm__weight=(2,), self_attn__k_norm__weight=(2,)), {}),
  ("ala", {}, {}, {}),
  ("resformer", {}, MANAGER | per_layer(range(1, L), **{f"{LAMBDA}2": (1,)}), {}),
  ("resformer", {"last_k": 1}, MANAGER | per_layer([3], **{f"{LAMBDA}2": (1,)}), {}),
  ("resformer", {"variant": "learnable"}, per_layer(range(1, L), **{f"{LAMBDA}1": (1,), f"{LAMBDA}2": (1,)}), {}),
  ("resformer", {"variant": "identity"}, {}, {}),
  ("resformer", {"variant": "constant"}, {}, {}),
  ("resformer", {"variant": "sparse"}, {}, {}),
  ("resformer", {"variant": "svformer"}, {}, per_layer(range(1, L), self_attn__v_proj__weight=(2 * K, C))),
  ("satformer", {}, per_layer(range(1, L), self_attn__value_residual_mixing__alpha_proj__weight=(K, C)), {}),
  ("relay", {}, per_layer(range(1, L), self_attn__relay_gate__weight=(K, C)), {}),
  ("satformer", {"last_k": 2}, per_layer([2, 3], self_attn__value_residual_mixing__alpha_proj__weight=(K, C)), {}),
  ("denseformer", {}, {f"{ALPHAS}.{i}.weight": (1, i + 2) for i in range(L)}, {}),
  ("denseformer", {"dilation": 2, "period": 2}, {f"{ALPHAS}.1.weight": (1, 2), f"{ALPHAS}.3.weight": (1, 3)}, {}),
  ("denseformer", {"dilation": 3, "period": 3}, {f"{ALPHAS}.2.weight": (1, 2)}, {}),
  ("mudd", {}, mudd(prepost=True), INPUT_NORMS),
  ("mudd", {"norm": "none"}, mudd(prepost=False), INPUT_NORMS),
  ("kv_share", {}, {}, per_layer([1, 3], self_attn__k_proj__weight=(2 * K, C), self_attn__v_proj__weight=(2 * K, C))),
  *(("mhc", {"mixing": mixing}, mhc(4, M, groups) | MHC_HEAD, {})
    for mixing, M, groups in (("sinkhorn", 24, 3), ("identity", 8, 2), ("permutations", 32, 3))),
  ("mhc", {"hc_mult": 3, "reads": "previous"}, mhc(3, 15, 3), {}),
  ("shortcuts", {}, SCALARS | shortcuts([1, 3], C), {}),
  ("shortcuts", {"value_embeds": "list", "value_layers": [0], "gate_channels": 3, "resid": False, "x0": False,
                 "backout": False}, shortcuts([0], 3), {}),
  ("shortcuts", {"value_embeds": "none", "resid": False, "x0": False, "backout": False, "unet": True, "lanes_from": 1,
                 "mudd_tail": "residual", "mudd_width": 5}, SPEED_RUN, {}),
  ("shortcuts", {"value_from": "x0", "attn_saved": 1}, SCALARS | per_layer(
    [1, 3], self_attn__ve_gate__weight=(K, C), self_attn__ve_proj__weight=(2 * K, C)), {}),
  ("gemma3n", {"hidden_size_per_layer_input": 6, "laurel_rank": 3}, GEMMA3N, {}),
  ("gated_streams", {}, gated_streams(1), ALL_NORMS),
  ("gated_streams", {"hc_count": 3, "hc_lowrank": 5}, gated_streams(5, 3), ALL_NORMS),
  *(("attnres", {"attn_res_block_size": size}, ATTNRES, {}) for size in (0, 3)),
)


# Of a tiny GPT-2: F = 6, V = 7, 9 positions; all tensors.
GPT2 = {"model.embed_tokens.weight": (7, C), "model.embed_positions.weight": (9, C), "model.norm.weight": (C,),
        **per_layer(range(L), input_layernorm__weight=(C,), self_attn__q_proj__weight=(C, C),
                    self_attn__k_proj__weight=(C, C), self_attn__v_proj__weight=(C, C),
                    self_attn__o_proj__weight=(C, C), post_attention_layernorm__weight=(C,),
                    mlp__up_proj__weight=(6, C), mlp__down_proj__weight=(C, 6))}
GPT2_BIASES = {"model.norm.bias": (C,),
               **{name[: -len("weight")] + "bias": shape[:1]
                  for name, shape in GPT2.items() if name.startswith("model.layers")}}


def shapes(arch, **options):
  with tempfile.TemporaryDirectory() as directory:
    model_dir.make_tiny(directory, arch=arch, **{"K": K, **options})
    return {name: tuple(tensor.shape) for name, tensor in model_dir.load(directory).state_dict().items()}


def sizes(*numbers, **options):
  C, F, L, H, V, D = numbers
  return dict(hidden_size=C, intermediate_size=F, num_hidden_layers=L, num_attention_heads=H, vocab_size=V, head_dim=D,
              num_key_value_heads=H, **options)


LIME = sizes(2048, 8192, 16, 32, 50257, 64, tie_word_embeddings=True)
LIME_GQA = LIME | {"num_key_value_heads": 8}
SMALL, LARGE = (sizes(C, 4 * C, L, H, 32000, 64, tie_word_embeddings=True, qk_norm=True)
                for C, L, H in ((768, 11, 12), (1536, 19, 24)))
VERTICAL = sizes(192, 768, 6, 3, 128256, 128) | {"num_key_value_heads": 1}
WIDTHS = [1536, 1792, 2048, 2560, 2816, 3072, 3328, 3584, 4096, 4352, 4608]
AFFINE = {"rate": 2, "norm": "layernorm", "prenorm": "rmsnorm"}
GAIN = {"rate": 4, "norm": "rmsnorm", "prenorm": "rmsnorm"}

def gpt2(C, L, H, V, bias):
  return sizes(C, 4 * C, L, H, V, C // H, tie_word_embeddings=True, backbone="gpt2", max_position_embeddings=1024,
               bias=bias)


COUNTS = (
  (Llama, gpt2(768, 12, 12, 50304, False), {}, 124373760),
  (Llama, gpt2(1600, 48, 25, 50304, False), {}, 1556840000),
  (Llama, gpt2(768, 12, 12, 50257, True), {}, 124439808),
  (Llama, gpt2(768, 12, 12, 50257, True), {"engram_layers": [1]}, 124439808 + 48 * 1049422 + 2 * 768 * 769),
  (Llama, LIME, {}, 1176735744),
  (Llama, LIME_GQA, {}, 1076072448),
  (LimeStatic, LIME, {}, 1176770784),
  (LimeDynamic, LIME, {}, 1185613824),
  (Hyper, LIME, {}, 1177064256),
  (Hyper, LIME_GQA, {}, 1076400960),
  (Llama, SMALL, {}, 128404096),
  (Llama, LARGE, {}, 766440320),
  (Satformer, SMALL, {}, 128404096 + 92160),
  (Resformer, SMALL, {}, 128404096 + 21),
  (Denseformer, SMALL, {}, 128404096 + 77),
  (Denseformer, LARGE, {"dilation": 4, "period": 5}, 766440320 + 9),
  (Mudd, SMALL, {"intermediate_sizes": WIDTHS}, 128729008),
  (Mudd, LARGE, {}, 768164456),
  (Moda, SMALL, {}, 128404096 + 10 * (2 * 768 * 768 + 64)),
  (Hyper, SMALL, AFFINE, 128404096 + 101596),
  (Hyper, LARGE, AFFINE, 766440320 + 350588),
  (Hyper, SMALL, GAIN, 128404096 + 118844),
  (Vertical, VERTICAL, {}, 53086677),
  (Vertical, VERTICAL, {"map": "unet"}, 53086656),
)


def run(check):
  plain = shapes("llama")
  for arch, options, added, missing in ADDED:
    want = {name: shape for name, shape in (plain | added).items() if name not in missing}
    got = shapes(arch, **options)
    check(f"{arch} {options} stores other tensors or shapes: {sorted(want.items() ^ got.items())}", want == got)
  for bias in (False, True):
    got, want = shapes("gpt2", K=4, max_position_embeddings=9, bias=bias), GPT2 | (GPT2_BIASES if bias else {})
    check(f"gpt2 stores other tensors or shapes: {sorted(want.items() ^ got.items())}", want == got)
  for model_class, size, options, want in COUNTS:
    with torch.device("meta"):
      got = sum(p.numel() for p in model_class(model_class.config_class(**size, **options)).parameters())
    check(f"{model_class.__name__} {options} has {got} parameters, not {want}", got == want)
