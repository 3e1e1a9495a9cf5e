#!/usr/bin/env python3
"""Checks that a plain LLaMA, a Mistral, a Ministral, a Qwen2, a dense Qwen3 and a GPT-2 travel both ways between
crossply and the transformers library, with attention windows too.

  dev/check_transformers.py [BUILD]      BUILD: the directory with the programs, default build

Out: directories written by the reference, and those that build/train_llama and train_gpt2 write, load in transformers
with no weight missing or left over, and give the logits of our reference module, the loss and the gradients of
build/gradients, and the text of build/generate.
In: directories written by transformers, with windows, with linear, yarn's and Llama 3.1's rotary scaling, and a GPT-2
of the 124M shape, do the same; what the trainers' --init makes of them gives transformers the same logits, the same
type of model, special tokens and generation_config.json.

Exit 0: all hold. 1: one does not. 77: skipped, PyTorch or transformers is not importable.
"""
import json
import os
import pathlib
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
try:
  import torch
  import transformers
except ImportError as missing:
  print(f"skipped: {missing.name} is not importable")
  sys.exit(77)
from compare_gradients import B, T, need_program, run, run_gradients, split
from reference import model_dir
from reference.model_dir import windows

OLD = not hasattr(transformers.LlamaConfig(), "rope_parameters")  # before version 5 the keys of rope stand apart
# What from_pretrained calls the type of the weights.
DTYPE = "dtype" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56) else "torch_dtype"
# Of the largest logit, and of the loss: float32 in two orders of summation, and a factor of ten.
TOLERANCE = 1e-5
WRITTEN = 4  # tokens


def check_equal(what, got, want, own_error=lambda: 0.0):
  """own_error(): what rounding alone may do; asked where TOLERANCE is exceeded."""
  got, want = torch.as_tensor(got).double(), torch.as_tensor(want).double()
  error = ((got - want).abs().max() / want.abs().max()).item()
  allowed = TOLERANCE if error <= TOLERANCE else max(TOLERANCE, own_error())
  if got.shape != want.shape or not error <= allowed:
    raise RuntimeError(f"{what} differ by {error:.3g} of the largest, allowed {allowed:.3g}")


def theirs(directory):
  """The directory as transformers reads it, complete or an error."""
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
    directory, attn_implementation="eager", output_loading_info=True, **{DTYPE: torch.float32})
  for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
    if report[key]:
      raise RuntimeError(f"transformers reports {key} {sorted(report[key])}")
  return model


def check_directory(directory, build):
  """Transformers, the reference and build/gradients agree about one model directory."""
  ours, other = model_dir.load(directory), theirs(directory)
  generator = torch.Generator().manual_seed(2)
  tokens = torch.randint(0, ours.config.vocab_size, (B * T + 1,), generator=generator).tolist()
  inputs, targets = split(tokens)
  logits = other(inputs, use_cache=False).logits
  want = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
  with torch.no_grad():
    check_equal("the logits of transformers and of the reference", logits, ours(inputs))
  with tempfile.TemporaryDirectory() as scratch:
    loss, gradients = run_gradients(build, directory, tokens, pathlib.Path(scratch) / "gradients.safetensors")
  check_equal("the losses of gradients and of transformers", loss, want.detach())
  want.backward()
  check_gradients(other, gradients)
  if not (directory / "tokenizer.json").exists():  # else prompts are words
    check_text(other, directory, build, tokens[:5])


def check_text(other, directory, build, prompt):
  """Greedy text with a cache, before the token that ends one."""
  more = other.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=WRITTEN,
                        do_sample=False, pad_token_id=0)
  written = run(build / "generate", "--model", directory, "--prompt", " ".join(map(str, prompt)), "--max-new",
                str(WRITTEN))
  ends = other.config.eos_token_id
  ends = ends if isinstance(ends, list) else [ends]
  def text(ids):
    new = ids[len(prompt):]
    return new[: next((at for at, token in enumerate(new) if token in ends), len(new))]
  ours, wanted = text([int(token) for token in written.split()]), text(more[0].tolist())
  if ours != wanted:
    raise RuntimeError(f"generate writes {ours}, transformers {wanted}")


def check_gradients(other, gradients):
  """Each against transformers', which has Hugging Face's names; keys' biases have none but rounding's."""
  wanted = {name: parameter.grad for name, parameter in other.named_parameters()}
  if gradients.keys() != wanted.keys():
    raise RuntimeError(f"gradients of {sorted(gradients.keys() ^ wanted.keys())} are on one side only")
  for name, gradient in wanted.items():
    check_equal(f"the gradients of {name}", gradients[name].copy(), gradient)


def rope_of(config):
  """The rotary settings, which stand together since version 5; type is rope_type's old name."""
  found = {"rope_type": "default", "rope_theta": getattr(config, "rope_theta", None)}
  for key in ("rope_scaling", "rope_parameters"):
    found |= getattr(config, key, None) or {}
  return {key: value for key, value in found.items() if value is not None and key != "type"}


def check_round_trip(directory, build):
  """The directory, and what our trainer writes from it, are the same model to transformers."""
  again = directory.parent / "again"
  shard = directory.parent / "shard.bin"
  header = [20240520, 1, 4 * T] + [0] * 253
  shard.write_bytes(b"".join(i.to_bytes(4, "little") for i in header) + bytes(8 * T))
  before = theirs(directory)
  program = "train_gpt2" if before.config.model_type == "gpt2" else "train_llama"
  run(build / program, "--init", directory, "--data", shard, "--seq", "4", "--out", again, "--steps", "0")
  after = theirs(again)
  tokens = torch.arange(11)[None]
  with torch.no_grad():
    check_equal("the logits before and after", after(tokens).logits, before(tokens).logits)
  if type(before) is not type(after):
    raise RuntimeError(f"{type(before).__name__} became {type(after).__name__}")
  kept = ("bos_token_id", "eos_token_id", "pad_token_id", "sliding_window", "use_sliding_window", "layer_types",
          "rms_norm_eps", "head_dim", "n_inner", "n_positions", "layer_norm_epsilon", "activation_function",
          "scale_attn_by_inverse_layer_idx", "tie_word_embeddings")
  for key in kept:
    was, became = (getattr(model.config, key, None) for model in (before, after))
    if was != became and (key, was) != ("head_dim", None):  # which is then the width of a head
      raise RuntimeError(f"{key} {was} became {became}")
  was, became = rope_of(before.config), rope_of(after.config)
  if was != became:
    raise RuntimeError(f"the rotary settings {was} became {became}")
  if (directory / "generation_config.json").read_text() != (again / "generation_config.json").read_text():
    raise RuntimeError("generation_config.json is another one")


def written_by_reference(directory, build, **options):
  model_dir.make_tiny(directory, **options)
  return directory


def written_by_trainer(directory, build, flags, program="train_llama"):
  """An initialised model, straight from the program people run."""
  run(build / program, "--data", "arith:4", "--out", directory, *flags, "--steps", "0")
  models = [path.parent for path in sorted(directory.rglob("model.safetensors"))]
  if not models:
    raise RuntimeError(f"{program} --steps 0 wrote no model.safetensors")
  return models[0]


ROPE = {"rope_type": "default", "rope_theta": 100.0}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
# The original length is that of the model, which transformers 4.49 takes it for whatever the key says.
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 6.0, "beta_slow": 0.5}
YARN_MORE = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 40}


def written_by_transformers(directory, build, tied, K, head_dim, model="Llama", rope=ROPE, lists=True, **more):
  """lists: does its configuration say of each layer whether it has a window?"""
  # A wide initialisation, so that the loss of a random model depends on every part of it.
  scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
  ropes = {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope is ROPE else scaling} if OLD else {
    "rope_parameters": dict(rope)}
  width = {} if head_dim is None else {"head_dim": head_dim}
  config = getattr(transformers, model + "Config")(
    vocab_size=11, hidden_size=16, intermediate_size=10, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=K, tie_word_embeddings=tied, max_position_embeddings=64, rms_norm_eps=1e-4,
    initializer_range=0.3, bos_token_id=3, eos_token_id=[5, 7], pad_token_id=None, **width, **ropes, **more)
  torch.manual_seed(3)
  other = getattr(transformers, model + "ForCausalLM")(config)
  with torch.no_grad():
    for name, parameter in other.named_parameters():
      if "norm" in name or name.endswith(".bias"):
        parameter.add_(0.3 * torch.randn(parameter.shape))
  other.save_pretrained(directory)
  if not lists:
    path = directory / "config.json"
    keys = json.loads(path.read_text())
    del keys["layer_types"]
    path.write_text(json.dumps(keys))
  check_round_trip(directory, build)
  return directory


def written_by_transformers_gpt2(directory, build, **options):
  sizes = dict(vocab_size=11, n_embd=16, n_layer=3, n_head=4, n_positions=64, initializer_range=0.3,
               layer_norm_epsilon=1e-4, bos_token_id=3, eos_token_id=[5, 7])
  config = transformers.GPT2Config(**{**sizes, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, **options})
  torch.manual_seed(3)
  other = transformers.GPT2LMHeadModel(config)
  with torch.no_grad():
    for name, parameter in other.named_parameters():
      if parameter.ndim == 1:
        parameter.add_(0.3 * torch.randn(parameter.shape))
  other.save_pretrained(directory)
  check_round_trip(directory, build)
  return directory


CASES = [(written_by_reference, {"tied": tied, "K": K, "head_dim": head_dim})
         for tied, K, head_dim in ((True, 4, 2), (True, 2, 6), (False, 2, 2))]
CASES += [(written_by_transformers, {"tied": tied, "K": K, "head_dim": head_dim})
          for tied, K, head_dim in ((True, 2, None), (False, 2, None), (False, 1, 8))]
CASES += [(written_by_transformers, {"tied": False, "K": 2, "head_dim": 8, "model": model, "rope": rope})
          for model, rope in (("Llama", LLAMA3), ("Llama", LINEAR), ("Llama", YARN), ("Qwen3", ROPE),
                              ("Qwen3", LLAMA3)) if hasattr(transformers, model + "Config")]
CASES += [(written_by_transformers, {"tied": tied, "K": 2, "head_dim": None, "model": "Qwen2", "rope": rope})
          for tied, rope in ((True, ROPE), (False, YARN))]
CASES += [(written_by_transformers, {"tied": False, "K": 2, "head_dim": None, "model": "Mistral", "rope": rope,
                                     "sliding_window": window})
          for rope, window in ((ROPE, None), (ROPE, 64), (LINEAR, None), (ROPE, 3), (YARN, 4))]
CASES += [(written_by_transformers, {"tied": tied, "K": 2, "head_dim": 8, "model": "Ministral",
                                     **windows("SLS", window)})
          for tied, window in ((True, 2), (False, 4)) if hasattr(transformers, "MinistralConfig")]
if not OLD:  # 4.49 lists no layers
  USED = {"tied": False, "K": 2, "head_dim": None, "use_sliding_window": True}
  CASES += [(written_by_transformers, USED | {"model": "Qwen2", **windows("SLL", 2)}),
            (written_by_transformers, USED | {"model": "Qwen3", "head_dim": 8, **windows("LSL", 3)}),
            (written_by_transformers, USED | {"model": "Qwen3", "head_dim": 4, **windows("SSS", 2)})]
  CASES += [(written_by_transformers, USED | {"model": model, "head_dim": head_dim, "sliding_window": 2,
                                              "max_window_layers": 1, "lists": False})
            for model, head_dim in (("Qwen2", None), ("Qwen3", 6))]
if not OLD:  # 4.49 knows neither key
  CASES += [(written_by_transformers, {"tied": False, "K": 2, "head_dim": 8, "rope": YARN_MORE})]
GPT2 = {"arch": "gpt2", "K": 4, "max_position_embeddings": 9}
CASES += [(written_by_reference, GPT2 | {"tied": tied, "activation_function": activation,
                                         "scale_attn_by_inverse_layer_idx": scaled})
          for tied, activation, scaled in ((True, "gelu_new", False), (False, "gelu", True))]
CASES += [(written_by_transformers_gpt2, options) for options in (
  {}, {"activation_function": "gelu", "n_inner": 10}, {"scale_attn_by_inverse_layer_idx": True},
  {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}, {"n_embd": 15, "n_head": 5},
  {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-5,
   "initializer_range": 0.02})]  # the 124M
CASES += [(written_by_trainer, {"flags": flags, "program": "train_gpt2"})
          for flags in ((), ("--tie", "false", "--activation", "gelu", "--scale-attn-by-layer", "true"))]
WINDOW = ("--attention-window", "3", "--attention-window-pattern")
CASES += [(written_by_trainer, {"flags": ()}), (written_by_trainer, {"flags": (*WINDOW, "SSSS")})]
if hasattr(transformers, "MinistralConfig"):
  CASES += [(written_by_trainer, {"flags": (*WINDOW, "SL")})]
if hasattr(transformers, "Qwen3Config"):
  CASES += [(written_by_trainer, {"flags": ("--qk-norm", "true", "--norm-eps", "1e-5", *flags)})
            for flags in ((), (*WINDOW, "LSS"))]


def main():
  build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build")
  need_program(build / "gradients")
  need_program(build / "train_llama")
  need_program(build / "train_gpt2")
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  failures = 0
  for write, options in CASES:
    with tempfile.TemporaryDirectory() as scratch:
      try:
        check_directory(write(pathlib.Path(scratch) / "model", build, **options), build)
      except (RuntimeError, ValueError, OSError) as problem:
        failures += 1
        print(f"FAILED: {write.__name__} {options}: {problem}")
  print(f"{len(CASES) - failures} of {len(CASES)} directories mean the same to crossply and to transformers")
  sys.exit(1 if failures else 0)


if __name__ == "__main__":
  main()
