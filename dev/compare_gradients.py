#!/usr/bin/env python3
"""Compares build/gradients with PyTorch: the loss and the gradient of every parameter, for many tiny models, pairs of
architectures among them; of each architecture also with windows, and over rows of several documents.

  dev/compare_gradients.py [BUILD]      BUILD: the directory with the program, default build

Exit 0: all agree. 1: some do not. 77: skipped, PyTorch is not importable.
"""
import itertools
import math
import pathlib
import re
import subprocess
import sys
import tempfile

try:
  import torch
except ImportError:
  print("skipped: PyTorch is not importable")
  sys.exit(77)
from reference import combinations, model_dir
from reference.model_dir import windows

B, T = 2, 5
# The engine computes in float32, the reference in double from the same float32 weights. What that costs was measured by
# letting PyTorch itself compute in float32, over plain LLaMA and LIMe and several seeds: up to 0.3 of the first limit
# and half of the second. The smallest mistake worth catching, a wrong epsilon, is 30 times the second.
LOSS_TOLERANCE = 1e-6  # relative
GRADIENT_TOLERANCE = 2e-5  # the largest difference in a tensor, relative to the tensor's root mean square
# A tensor whose gradient nearly cancels is judged by this fraction of the root mean square of all gradients instead.
FLOOR = 0.05
# Some models amplify rounding, hyper-connections and blocks without residuals most. Where PyTorch in float32 loses more
# than a quarter of the limits, four times that is allowed: the worst of this many runs, weights nudged by one rounding.
OWN_RUNS, OWN_FACTOR = 4, 4

# Every architecture, and every option that changes what is computed.
CROSSED = (  # each with every backbone
  {"arch": "llama"},
  {"arch": "lime", "routing": "full"},
  {"arch": "lime", "routing": "average"},
  {"arch": "lime", "routing": "own", "kv_init": "normal"},
  {"arch": "lime", "routing": "last", "window": 2},
  {"arch": "lime", "routing": "first", "window": 2},
)
HYPER_NORMS = ("layernorm_no_affine", "layernorm", "rmsnorm")
PRENORMS = ("layernorm_no_affine", "rmsnorm")
DILATION_PERIOD = ((1, 1), (2, 1), (1, 2), (2, 3), (3, 2))
OPERATOR_1 = {"loop": "anchor"}
TWO_CORES = {"loop": "anchor", "loop_passes": 2, "loop_layers": [1, 1, 1], "loop_tied": False}
STREAMED = ("lime", "lime_static", "lime_dynamic", "hyper", "sla", "resformer", "satformer", "kv_share", "mhc",
            "shortcuts", "gated_streams", "relay", "depth_attention", "moda")
# A table of a few rows, so that one row has several n-grams.
ENGRAM = {"engram_layers": [1], "engram_heads": 2, "engram_rows": 5}
BOUNDED = {**ENGRAM, "engram_layers": [0, 2], "engram_boundary": [2, 5], "engram_pad_id": 1, "engram_seed": 3}
UNET, FROM_X0 = {"unet": True}, {"value_from": "x0"}
TAIL = {"mudd_tail": "residual", "mudd_width": 5}
ENGRAMS = (
  {"arch": "llama", **ENGRAM},
  {"arch": "llama", **BOUNDED, "engram_width": 16, "engram_order": 5},
  {"arch": "llama", **ENGRAM, "engram_map": [0, 1, 2, 1, 3, 0, 4], "engram_multipliers": [[5, 2**60 + 1, 7]]},
  {"arch": "lime", **BOUNDED},
  {"arch": "hyper", **BOUNDED},
  *({"arch": "mhc", **ENGRAM, "hc_mult": streams} for streams in (1, 3)),
  {"arch": "mhc", "reads": "previous", **BOUNDED},
  {"arch": "gated_streams", **ENGRAM},
  {"arch": "shortcuts", **BOUNDED},
)
LOOPS = (
  *({"arch": arch, **OPERATOR_1} for arch in ("llama", *STREAMED)),
  *({"arch": arch, **TWO_CORES} for arch in ("llama", "mhc", "hyper", "resformer")),
  *({"arch": "mhc", "reads": "previous", **more}
    for more in (OPERATOR_1, OPERATOR_1 | {"loop_norm": "all"}, TWO_CORES)),
  {"arch": "mhc", "reads": "previous", **OPERATOR_1, "loop_norm": "all", "loop_layers": [0, 3, 1]},
  {"arch": "llama", **OPERATOR_1, "loop_passes": 3},
  {"arch": "llama", **OPERATOR_1, "loop_passes": 2, "loop_layers": [1, 2, 1], "loop_norm": "all", "loop_alpha": -0.7,
   "loop_end": False},
  {"arch": "llama", **OPERATOR_1, "loop_passes": 2, "loop_layers": [0, 4, 0], "loop_norm": "none"},
  {"arch": "llama", **OPERATOR_1, "loop_passes": 2, "loop_alpha": 0.0, "block_norm": "sum"},
  *({"arch": "denseformer", **more, "loop_norm": "none", "loop_alpha": 0.0} for more in (OPERATOR_1, TWO_CORES)),
  *({"arch": arch, "block_norm": norm} for arch in ("llama", "lime", "resformer") for norm in ("branch", "sum")),
)
STACK = {"loop": "stack", "loop_passes": 2}
GATED = {"loop": "stack", "loop_passes": 3, "exit_gate": True}
STACKS = (
  *({"arch": arch, **STACK} for arch in ("llama", *STREAMED, "attnres", "vertical", "denseformer", "mudd", "ala")),
  {"arch": "mhc", "reads": "previous", **STACK},
  {"arch": "llama", **STACK, **ENGRAM},
  {"arch": "llama", **STACK, "block_norm": "branch"},
  *({"arch": arch, **GATED} for arch in ("llama", "lime", "mhc", "shortcuts")),
  {"arch": "llama", **GATED, "loop_passes": 2, "exit_beta": 0.4},
  {"arch": "llama", **GATED, "loop_passes": 5, "exit_beta": 0.0},
)
CAPPED = (
  *({"arch": arch, "final_logit_softcapping": 0.4} for arch in ("llama", "lime", "mhc", "shortcuts")),
  {"arch": "llama", **GATED, "final_logit_softcapping": 1.5},
)
SAMPLED = (  # each with three or four backbones
  *LOOPS,
  *STACKS,
  *ENGRAMS,
  *CAPPED,
  {"arch": "llama", **OPERATOR_1, **BOUNDED},
  {"arch": "lime_static"},
  {"arch": "lime_static", "top_p": 0.7},
  {"arch": "lime_static", "top_p": 0.4},
  {"arch": "lime_static", "block_norm": "sum"},
  {"arch": "lime_dynamic"},
  *({"arch": "hyper", "norm": norm, "prenorm": prenorm} for norm in HYPER_NORMS for prenorm in PRENORMS),
  *({"arch": "hyper", "dynamic": False, "prenorm": prenorm} for prenorm in PRENORMS),
  {"arch": "hyper", "rate": 1, "prenorm": "rmsnorm"},
  {"arch": "hyper", "rate": 3, "norm": "layernorm", "layer_index": "sublayer"},
  *({"arch": "vertical", "map": name, "residual": residual}
    for name in ("learned", "unet", "inet") for residual in (True, False)),
  {"arch": "vertical", "map": "unet", "mirror_offset": 2},
  {"arch": "sla"},
  {"arch": "sla", "distance": 1, "heads": 3},
  {"arch": "sla", "distance": 2, "heads": 4},
  *({"arch": "ala", "stride": stride} for stride in (2, 1, 3)),
  {"arch": "ala", "include_self": False},
  *({"arch": "resformer", "variant": variant, "last_k": last_k}
    for variant in ("plus", "identity", "constant", "learnable", "sparse", "svformer") for last_k in (0, 2)),
  *({"arch": "satformer", "gate": gate}
    for gate in ("relu", "sigmoid", "softmax", "softmax_sigmoid", "tanh", "identity")),
  {"arch": "satformer", "gate": "softmax", "last_k": 2},
  *({"arch": "denseformer", "dilation": dilation, "period": period} for dilation, period in DILATION_PERIOD),
  *({"arch": "attnres", "attn_res_block_size": size} for size in (0, 1, 2, 4)),
  {"arch": "attnres", "attn_res_block_size": 0, "rms_norm_eps": 1e-2},
  *({"arch": "kv_share", "cla_factor": factor} for factor in (2, 3)),
  {"arch": "kv_share", "sharing": "suffix", "num_kv_shared_layers": 2},
  {"arch": "kv_share", "sharing": "list", "kv_owners": [0, 1, 3]},
  *({"arch": "mhc", "mixing": mixing, "reads": reads}
    for mixing in ("sinkhorn", "identity", "permutations") for reads in ("own", "previous")),
  *({"arch": "mhc", "hc_mult": streams, "hc_sinkhorn_iters": 3, "hc_eps": 1e-2, "rms_norm_eps": 1e-2}
    for streams in (1, 3)),
  {"arch": "shortcuts"},
  {"arch": "shortcuts", "embed_norm": True, "gate_channels": 3, "gate_scale": 2.0, "resid": False},
  {"arch": "shortcuts", "value_embeds": "list", "value_layers": [0, 1], "x0": False, "backout": False},
  {"arch": "shortcuts", "value_embeds": "none"},
  *({"arch": "shortcuts", **option}
    for option in (UNET, FROM_X0, {"lanes_from": 1}, {"attn_saved": 1}, TAIL, TAIL | {"resid": False, "x0": False})),
  {"arch": "shortcuts", **UNET, **FROM_X0, "lanes_from": 3, "attn_saved": 1, **TAIL, "backout": False},
  {"arch": "shortcuts", **UNET, "resid": False, "x0": False, "backout": False, "lanes_from": 2},
  {"arch": "shortcuts", **UNET, **FROM_X0, **TAIL, "attn_saved": 2, **OPERATOR_1},
  {"arch": "shortcuts", **TAIL, "mudd_tail": "both", "K": 4, "head_dim": 2},  # whose values are as wide as the stream
  {"arch": "gated_streams", "hc_lowrank": 3},
  *({"arch": "gated_streams", "hc_count": streams, "rms_norm_eps": 1e-2} for streams in (1, 3)),
  {"arch": "gemma3n", "hidden_size_per_layer_input": 6, "laurel_rank": 3},
  {"arch": "gemma3n", "hidden_size_per_layer_input": 0, "laurel_form": "paper", "rms_norm_eps": 1e-2},
  {"arch": "gemma3n", "hidden_size_per_layer_input": 5, "laurel_rank": 0, "embed_scale": "none", "rms_norm_eps": 1e-2},
  {"arch": "gemma3n", "hidden_size_per_layer_input": 3, "laurel_rank": 2, **OPERATOR_1},
  {"arch": "depth_attention"},
  {"arch": "depth_attention", "depth_stride": 1},
  {"arch": "depth_attention", "depth_start": 2, "depth_stride": 3, "depth_recent": 1},
  {"arch": "moda"},
  {"arch": "moda", "depth_start": 2, "depth_window": 1},
  {"arch": "moda", "depth_window": 2, "ffn_kv": False},
  {"arch": "relay"},
  {"arch": "mudd", "norm": "prepost"},
  {"arch": "mudd", "norm": "none"},
  {"arch": "mudd", "norm": "none", "intermediate_sizes": [3, 5, 6, 10]},
  *({"arch": "mudd", "norm": norm, "rms_norm_eps": 1e-3} for norm in ("prepost", "none")),
  *({"arch": "hyper", "norm": norm, "dynamic_norm_eps": 1e-2} for norm in HYPER_NORMS),
  *({"arch": "lime_static", "top_p": top_p, "top_p_renormalize": False} for top_p in (0.7, 0.4)),
)


def tiny_models():
  """Arguments of make_tiny. The untied models also move the q/k epsilon away from its default."""
  backbones = list(itertools.product((4, 2), (False, True), (True, False), (2, 6)))
  pairs = list(itertools.product(CROSSED, backbones))
  for number, connection in enumerate(SAMPLED):
    # A stride of 5 through the 16: every setting of a backbone occurs on both of its values.
    pairs += itertools.product([connection], backbones[number % 5 :: 5])
  for connection, (K, qk_norm, tied, head_dim) in pairs:
    options = dict(dict(K=K, qk_norm=qk_norm, tied=tied, head_dim=head_dim), **connection)
    if qk_norm and not tied:
      options["qk_norm_eps"] = 1e-2
    yield options


# A Qwen2's block, with yarn's rotary frequencies, of which one stays and one is divided.
QWEN2 = {"K": 2, "head_dim": 4, "qkv_bias": True,
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 1.2,
                          "beta_slow": 0.2}}


def tiny_qwen2s():
  """The same on it, but for what refuses its biases."""
  for number, connection in enumerate((*CROSSED, *SAMPLED)):
    if connection["arch"] not in ("lime_static", "lime_dynamic"):
      yield dict(connection, **QWEN2, tied=number % 2 == 0)


def tiny_gpt2s():
  """The same on the backbone gpt2: itself with all its options, every connection with two or three of them."""
  backbones = [dict(zip(("bias", "tied", "activation_function", "scale_attn_by_inverse_layer_idx"), values))
               for values in itertools.product((True, False), (True, False), ("gelu_new", "gelu"), (False, True))]
  for number, connection in enumerate(({"arch": "gpt2"}, *CROSSED[1:], *SAMPLED)):
    # A stride of 7 through the 16: every setting occurs on both of its values with every other three connections.
    for backbone in backbones[number % 7 if number else 0 :: 7 if number else 1]:
      yield dict(connection, **backbone, backbone="gpt2", K=4, max_position_embeddings=9)


def one_of_each():
  """A connection of every architecture, some loops and n-grams, and a pair."""
  first = {}
  for connection in (*CROSSED, *SAMPLED):
    if "loop" not in connection and "engram_layers" not in connection:
      first.setdefault(connection["arch"], connection)
  loops = ({"arch": arch, **loop} for arch, loop in (("llama", OPERATOR_1 | {"loop_passes": 3}), ("sla", OPERATOR_1),
                                                     ("mhc", TWO_CORES), ("lime", STACK), ("llama", GATED)))
  return (*first.values(), *loops, {"arch": "llama", **BOUNDED, "engram_width": 16, "engram_order": 5},
          {"arch": "mhc", **ENGRAM}, {"arch": "mhc+lime"})


def tiny_windows():
  """Each with windows, with both, and on a GPT-2, which has no windows, with documents. documents: a mark, as
  in_documents takes it."""
  llamas = ({"K": 2, "head_dim": 6}, {"K": 4, "qk_norm": True, "tied": False, "qk_norm_eps": 1e-2}, {"K": 1})
  for number, connection in enumerate(one_of_each()):
    on_llama, turn = {**llamas[number % 3], **connection}, number % 2
    yield {**on_llama, **windows(("SSLL", "LLSS")[turn], 2)}
    yield {**on_llama, **windows(("LLSS", "SSLL")[turn], 1 + number % 3), "documents": ("after", "before")[turn]}
    yield {**connection, "K": 4, "backbone": "gpt2", "max_position_embeddings": 9,
           "documents": ("before", "after")[turn]}


def need_program(path):
  if not path.exists():
    sys.exit(f"{path} is missing: build it first (make)")


def run(program, *flags, said=""):
  """What the program prints, which reads `said`; an error where it fails."""
  done = subprocess.run([program, *flags], capture_output=True, text=True, input=said)
  if done.returncode != 0:
    raise RuntimeError(f"{program.name} ended with {done.returncode}: {done.stderr.strip()}")
  return done.stdout


def run_gradients(build, model, tokens, out, *flags):
  """(loss, {name: gradient}) by the program. `tokens` is a list of B*T + 1 integers."""
  token_file = pathlib.Path(out).with_suffix(".txt")
  token_file.write_text(" ".join(map(str, tokens)) + "\n")
  printed = run(build / "gradients", "--model", model, "--tokens", token_file, "--batch", str(B), "--seq", str(T),
                "--out", out, *flags)
  loss = re.search(r"^loss (\S+)$", printed, re.MULTILINE)
  if loss is None:
    raise RuntimeError(f"gradients printed no line 'loss NUMBER': {printed!r}")
  return float(loss[1]), model_dir.read_safetensors(out)


def split(tokens):
  """Inputs and targets (B, T) of a list of B*T + 1 tokens."""
  tokens = torch.tensor(tokens)
  return tokens[:-1].view(B, T), tokens[1:].view(B, T)


def in_documents(tokens, mark):
  """What tells build/gradients where documents begin, and the positions (B, T) of the tokens in them. mark: after or
  before the third token and those like it, or "", of which there are no documents."""
  if not mark:
    return (), None
  positions, eot = split(tokens)[0].clone(), tokens[2]
  for row in positions:
    ids, at = row.tolist(), -1
    for t, token in enumerate(ids):
      begins = token == eot if mark == "before" else t > 0 and ids[t - 1] == eot
      at = 0 if begins else at + 1
      row[t] = at
  return ("--documents", mark, "--eot", str(eot)), positions


def autograd(module, tokens, positions=None):
  """(loss, {name: gradient}) by PyTorch, in double."""
  loss = module.loss(*split(tokens), positions)
  loss.backward()
  # PyTorch has no gradient for what nothing reads, such as keys of a layer all of whose heads look elsewhere.
  gradients = {name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
               for name, parameter in module.named_parameters()}
  gradients = {name: gradient.double() for name, gradient in gradients.items()}
  return loss.item(), model_dir.as_in_files(module, gradients)


def worst_error(got, want):
  """The largest error of the loss or of any gradient, as a multiple of the tolerance, and its name. NaN is an error."""
  (loss, gradients), (want_loss, wanted) = got, want
  total = torch.cat([gradient.flatten() for gradient in wanted.values()]).square().mean().sqrt().item()
  errors = [(abs(loss - want_loss) / (LOSS_TOLERANCE * abs(want_loss)), "the loss")]
  for name, gradient in wanted.items():
    scale = max(gradient.square().mean().sqrt().item(), FLOOR * total)
    errors.append(((gradients[name] - gradient).abs().max().item() / (GRADIENT_TOLERANCE * scale), name))
  return max(errors, key=lambda error: (math.isnan(error[0]), error))


def nudge(module, generator):
  """Every weight by about one rounding of float32."""
  with torch.no_grad():
    for parameter in module.parameters():
      parameter *= 1 + 2.0**-24 * torch.randn(parameter.shape, generator=generator)


def own_error(model, tokens, want, positions=None):
  """worst_error of PyTorch itself in float32."""
  generator, worst = torch.Generator().manual_seed(3), 0.0
  for _ in range(OWN_RUNS):
    module = model_dir.load(model)
    nudge(module, generator)
    worst = max(worst, worst_error(autograd(module.float(), tokens, positions), want)[0])
  return worst


def compare(build, model, tokens, out, documents=""):
  """The largest error of the loss and of any gradient, as a multiple of its limit; by how much PyTorch's own error
  widens the limits of this model, 1 if not at all; and where the error is."""
  flags, positions = in_documents(tokens, documents)
  loss, gradients = run_gradients(build, model, tokens, out, *flags)
  want = autograd(model_dir.load(model), tokens, positions)
  if gradients.keys() != want[1].keys():
    raise RuntimeError(f"gradients of {sorted(gradients.keys() ^ want[1].keys())} are on one side only")
  for name, gradient in want[1].items():
    if gradients[name].shape != tuple(gradient.shape):
      raise RuntimeError(f"{name} is {gradients[name].shape}, not {tuple(gradient.shape)}")
  got = loss, {name: torch.tensor(gradient, dtype=torch.float64) for name, gradient in gradients.items()}
  error, name = worst_error(got, want)
  return error, max(1.0, OWN_FACTOR * own_error(model, tokens, want, positions)), name


def check_complete(models):
  """Every architecture that the reference has must be among the models."""
  missing = model_dir.ARCHITECTURES.keys() - {options["arch"] for options in models}
  if missing:
    sys.exit(f"no model of {' '.join(sorted(missing))} is compared")


def main():
  build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build")
  need_program(build / "gradients")
  torch.set_num_threads(1)  # the models are tiny
  generator = torch.Generator().manual_seed(1)
  models = [*tiny_models(), *tiny_qwen2s(), *tiny_gpt2s(), *combinations.models(), *tiny_windows()]
  check_complete(models)
  failures = beyond = 0
  largest, plain = 0.0, (0.0, "")  # errors as a fraction of what is allowed, and of the limits as they stand; where
  with tempfile.TemporaryDirectory() as directory:
    model, out = pathlib.Path(directory) / "model", pathlib.Path(directory) / "gradients.safetensors"
    for seed, options in enumerate(models):
      described = " ".join(f"{key}={value}" for key, value in options.items())
      documents = options.pop("documents", "")
      model_dir.make_tiny(model, seed=seed, **options)
      tokens = torch.randint(0, 7, (B * T + 1,), generator=generator).tolist()
      try:
        error, widening, name = compare(build, model, tokens, out, documents)
        fine = error <= widening  # NaN is not
        complaint = "" if fine else f"{name} is off by {error / widening:.3g} times what is allowed"
        largest, plain = max(largest, error / widening), max(plain, (error, f"{described}: {name}"))
        beyond += fine and error > 1
      except (RuntimeError, OSError) as problem:
        complaint = str(problem)
      if complaint:
        failures += 1
        print(f"FAILED: {described}: {complaint}")
  if failures:
    print(f"{failures} of {len(models)} models differ from PyTorch")
    sys.exit(1)
  print(f"{len(models)} models agree with PyTorch; the largest error is {largest:.2f} of what is allowed")
  print(f"{beyond} of them needed more than the plain limits ({LOSS_TOLERANCE:g} of the loss, {GRADIENT_TOLERANCE:g} "
        f"of a gradient's rms); the largest error is {plain[0]:.2f} of these, in {plain[1]}")


if __name__ == "__main__":
  main()
