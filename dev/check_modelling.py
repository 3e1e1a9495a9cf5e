#!/usr/bin/env python3
"""Checks the modelling files that saved models carry: every architecture, with every option that changes what is
computed and with windows, on both backbones, and all pairs that go together, as the transformers library loads them
from the directory that our trainer writes.

  dev/check_modelling.py [BUILD]      BUILD: the directory with the programs, default build

Logits and loss are the engine's; generation with a key/value cache is that without one and that of build/generate,
beside shorter prompts padded on the left, too; what save_pretrained writes loads here and there as the same model. One
model of each architecture and backbone also: beam search and sampling with a cache and without, bf16, several files of
weights, and where there is peft, a LoRA that trains and merges. The tokenizers that lie beside the models are the same,
too.

Exit 0: all hold. 1: one does not. 77: skipped, PyTorch or transformers is not importable.
"""
import atexit
import copy
import json
import os
import pathlib
import shutil
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
modules = tempfile.mkdtemp()  # the library keeps copies of modelling files
atexit.register(shutil.rmtree, modules)
os.environ["HF_MODULES_CACHE"] = modules
try:
  import torch
  import transformers
  from safetensors.torch import load_file
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError as missing:
  print(f"skipped: {missing.name} is not importable")
  sys.exit(77)
try:
  import peft
except ImportError:
  peft = None
from check_transformers import DTYPE, check_equal
from compare_gradients import (CROSSED, OWN_FACTOR, QWEN2, SAMPLED, check_complete, need_program, nudge, one_of_each,
                               run, worst_error)
from reference import combinations, model_dir
from reference.llama import softcap
from reference.model_dir import windows

T, P, V = 9, 24, 7  # P: positions of a GPT-2
OWN_RUNS = 10  # with weights nudged by one rounding
# Beside the architecture's own options: one for every connection, in turn.
LLAMAS = ({"K": 2, "head_dim": 6}, {"K": 4, "qk_norm": True, "qk_norm_eps": 1e-2, "tied": False},
          {"K": 1, "rope_scaling": {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
                                    "high_freq_factor": 4.0, "original_max_position_embeddings": 40}})
GPT2 = {"backbone": "gpt2", "K": 4, "max_position_embeddings": P}
GPT2S = (GPT2 | {"bias": False, "tied": False, "scale_attn_by_inverse_layer_idx": True}, GPT2,
         GPT2 | {"activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True})


def variants():
  """Arguments of make_tiny. The backbones by themselves have settings that no plain model of the library has."""
  yield {"arch": "llama", **LLAMAS[1]}
  yield {"arch": "gpt2", **GPT2S[0]}
  for number, connection in enumerate((*CROSSED[1:], *SAMPLED)):
    yield {**LLAMAS[number % len(LLAMAS)], **connection}  # what the connection needs comes before
    yield {**GPT2S[number % len(GPT2S)], **connection}
  yield {"arch": "llama", **QWEN2, "qk_norm": True}
  for connection in (*CROSSED[1:], *SAMPLED):
    if connection["arch"] not in ("lime_static", "lime_dynamic"):
      yield {**connection, **QWEN2}
  yield {"arch": "mudd", "num_hidden_layers": 9, "T": 60}  # deeper and longer than the others
  for options in combinations.models():
    yield {**options, "max_position_embeddings": P} if options.get("backbone") == "gpt2" else options
  yield {"arch": "llama", **LLAMAS[1], **windows("SLLS", 3)}
  for number, connection in enumerate(one_of_each()[1:]):
    yield {**LLAMAS[number % len(LLAMAS)], **connection, **windows(("SSLL", "LLSS")[number % 2], 2 + number % 3)}


def trainer(arch):
  """The program that trains it, and the flags by which it does."""
  return ("train_combined", "--arch", arch) if "+" in arch else (f"train_{arch}",)


def expect(what, holds):
  if not holds:
    raise RuntimeError(what)


def load(directory, **more):
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
    directory, trust_remote_code=True, output_loading_info=True, **more)
  for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
    expect(f"transformers reports {key} {report[key]}", not report[key])
  return model.eval()


def write(model, tokens, mask=None, **more):
  """What the model writes after tokens (B, S); mask: 0 at padding."""
  mask = torch.ones_like(tokens) if mask is None else mask  # without one the library takes each token 0 for padding
  options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **more}
  return model.generate(input_ids=tokens, attention_mask=mask, **options)[:, tokens.shape[1] :]


class Case:
  """A tiny model, written by the reference, and from that by the trainer."""

  def __init__(self, build, scratch, seed, options):
    self.build, self.scratch, self.arch, self.T = build, scratch, options["arch"], options.pop("T", T)
    if (self.arch, options.get("backbone")) == ("llama", "gpt2"):
      self.arch = "gpt2"
    self.tokens = torch.randint(0, V, (1, self.T), generator=torch.Generator().manual_seed(seed))
    model_dir.make_tiny(scratch / "made", vocab_size=V, seed=seed, **options)
    # The same tokens again and again: every batch is of these.
    header = torch.tensor([20240520, 1, 100 * self.T] + [0] * 253, dtype=torch.int32)
    data = self.tokens.repeat(1, 100).to(torch.int16)
    (scratch / "data.bin").write_bytes(header.numpy().tobytes() + data.numpy().tobytes())
    self.directory = scratch / "saved"
    self.train("--init", scratch / "made", "--steps", "0", "--out", self.directory)
    self.model = load(self.directory)

  def train(self, *flags):
    program, *arch = trainer(self.arch)
    run(self.build / program, *arch, "--data", self.scratch / "data.bin", "--batch", "1", "--seq", str(self.T), *flags)

  def check_directory(self):
    """Nothing can take it for a plain model."""
    config = json.loads((self.directory / "config.json").read_text())
    expect(f"model_type is {config['model_type']}", config["model_type"] == model_dir.model_type(self.arch))
    module, name = config["auto_map"]["AutoModelForCausalLM"].split(".")
    expect(f"auto_map says {name}, architectures {config['architectures']}", [name] == config["architectures"])
    found = [path.name for path in self.directory.glob("*.py")]
    expect(f"the modelling files are {found}, not {module}.py", found == [f"{module}.py"])

  def check_logits(self):
    """The engine's are its head on what its last norm gives, which of gated streams is in their last read."""
    last = "streams.read" if "gated_streams" in self.arch.split("+") else "norm"
    config = self.model.model.config
    loss = f"loss.ce.{config.loop_passes - 1}" if config.exit_gate else "loss"  # of the last exit
    self.train("--init", self.directory, "--dump-tensors", last, loss, "--out", self.scratch / "dumped")
    dumped = model_dir.read_safetensors(self.scratch / "dumped" / "tensors.safetensors")
    norm, losses = (torch.from_numpy(dumped[name].copy()).double() for name in (last, loss))
    head = self.model.get_output_embeddings()
    targets = torch.cat([self.tokens, self.tokens[:, :1]], dim=1)
    with torch.no_grad():
      own = softcap(norm @ head.weight.double().T, config.final_logit_softcapping)
      check_equal("the logits", self.model(self.tokens).logits, own,
                  lambda: OWN_FACTOR * self.own_error())
      check_equal("the loss", self.model(targets, labels=targets).loss, losses.mean())

  def check_z_loss(self):
    """With --z-loss the trainer's gradients are those of the reference's loss, which has it in it."""
    self.train("--init", self.directory, "--z-loss", "0.3", "--dump-tensors", "d:*", "--out", self.scratch / "z")
    dumped = model_dir.read_safetensors(self.scratch / "z" / "tensors.safetensors")
    module = model_dir.load(self.directory)
    loss = module.loss(self.tokens, self.tokens.roll(-1, dims=1), z_loss=0.3)
    loss.backward()
    want = {name: parameter.grad for name, parameter in module.named_parameters()}
    got = {name: torch.tensor(dumped[f"d:{name}"], dtype=torch.float64) for name in want}
    error, name = worst_error((loss.item(), got), (loss.item(), want))
    expect(f"with a z-loss the gradient of {name} is off by {error:.3g} times what is allowed", error <= 1)

  def own_error(self):
    """What rounding alone does to the logits: the worst of some runs of a copy in double, its weights nudged by one
    rounding. A model that normalizes what nearly cancels amplifies it (hyper-connections, LayerNorm)."""
    exact, worst, generator = copy.deepcopy(self.model).double(), 0.0, torch.Generator().manual_seed(3)
    logits = exact(self.tokens).logits
    for _ in range(OWN_RUNS):
      nudged = copy.deepcopy(exact)
      nudge(nudged, generator)
      worst = max(worst, ((nudged(self.tokens).logits - logits).abs().max() / logits.abs().max()).item())
    return worst

  @torch.no_grad()
  def check_cache(self):
    """In pieces, with a cache, the tokens get the logits that they get together; so they do behind padding."""
    whole, cache, pieces = self.model(self.tokens).logits, transformers.DynamicCache(), []
    for piece in self.tokens.split([4, 1, self.T - 5], dim=1):
      pieces.append(self.model(piece, past_key_values=cache).logits)
    check_equal("the logits with a cache", torch.cat(pieces, dim=1), whole)
    mask = torch.ones(2, self.T + 2, dtype=torch.long)
    mask[0, :2] = 0
    rows = torch.cat([self.tokens[:, :2], self.tokens, self.tokens, self.tokens[:, :2]], dim=1).view(2, self.T + 2)
    logits = self.model(rows, attention_mask=mask).logits
    check_equal("the logits behind padding", logits[:1, 2:], whole)
    check_equal("the logits beside padding", logits[1:, : self.T], whole)

  def check_generation(self):
    prompt = self.tokens[:, :5]
    cached, ours = write(self.model, prompt), self.engine_writes(self.directory)
    expect(f"the engine writes {ours}, transformers {cached[0].tolist()}", cached[0].tolist() == ours)
    expect("generation depends on the cache", torch.equal(cached, write(self.model, prompt, use_cache=False)))
    rows = write(self.model, prompt.repeat(2, 1), torch.tensor([[1] * 5, [0] * 2 + [1] * 3]))
    expect("a prompt beside a padded one goes on otherwise", torch.equal(rows[:1], cached))
    expect("padding changes what is written", torch.equal(rows[1:], write(self.model, prompt[:, 2:])))

  def engine_writes(self, directory):
    prompt = " ".join(str(token) for token in self.tokens[0, :5].tolist())
    said = run(self.build / "generate", "--model", directory, "--prompt", prompt, "--max-new", "8")
    return [int(token) for token in said.split()[-8:]]

  def check_configuration(self):
    """What its configuration lacks is None."""
    config = self.model.config
    expect("a token's id is not None", config.bos_token_id is config.pad_token_id is None)
    config.use_cache = False
    expect("use_cache means nothing", self.model(self.tokens).past_key_values is None)
    config.use_cache = True

  def check_same(self, what, model, tokens):
    """Its weights are this model's bit for bit. Where they lie in memory decides about the order of sums."""
    weights = self.model.state_dict()
    expect(f"{what} has other weights",
           all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items()))
    with torch.no_grad():
      check_equal(f"the logits of {what}", model(tokens).logits, self.model(tokens).logits)

  def check_round_trip(self):
    again = self.scratch / "again"
    self.model.save_pretrained(again)
    self.check_same("what save_pretrained wrote", load(again), self.tokens)
    expect("the engine reads another model in it", self.engine_writes(again) == self.engine_writes(self.directory))
    self.model.load_state_dict(load_file(again / "model.safetensors"))  # as the library's Trainer does when it resumes

  def check_modes(self):
    """What depends on the architecture only by way of what it caches and by its modules' names and types."""
    prompt = torch.cat([self.tokens[:, :5], self.tokens[:, 4:]])
    for mode in ({"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}):
      written = []
      for use_cache in (True, False):
        torch.manual_seed(5)
        written.append(write(self.model, prompt, use_cache=use_cache, **mode))
      expect(f"{mode} depends on the cache", torch.equal(*written))
    with torch.no_grad():
      want, got = self.model(prompt).logits, load(self.directory, **{DTYPE: torch.bfloat16})(prompt).logits
    expect("bf16 is not loaded as such", got.dtype == torch.bfloat16)
    error = (got - want).abs().max() / want.abs().max()
    # Roundings of 2^-9, which four layers amplify.
    expect(f"in bf16 logits differ by {error:.3g} of the largest", error <= 0.3)
    self.model.save_pretrained(self.scratch / "pieces", max_shard_size="3KB")
    expect("the pieces of a model are one file", len(list((self.scratch / "pieces").glob("*.safetensors"))) > 1)
    self.check_same("the model in pieces", load(self.scratch / "pieces"), prompt)
    if peft is not None:
      self.check_lora(prompt)

  def check_lora(self, prompt):
    before = self.model(prompt).logits
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(load(self.directory), config)
    check_equal("the logits under a new LoRA", model(prompt).logits.detach(), before.detach())
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1.0)
    for _ in range(2):
      optimizer.zero_grad()
      model(prompt, labels=prompt).loss.backward()
      optimizer.step()
    for name, parameter in model.named_parameters():
      expect(f"{name} did not train", not parameter.requires_grad or parameter.grad.abs().max() > 0)
    trained = model.eval()(prompt).logits.detach()
    expect("a trained LoRA changes nothing", (trained - before).abs().max() > 1e-3)
    model.save_pretrained(self.scratch / "lora")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(self.scratch / "lora", trust_remote_code=True).eval()
    check_equal("the logits of a LoRA that was saved", again(prompt).logits.detach(), trained)
    check_equal("the logits of a merged LoRA", model.merge_and_unload()(prompt).logits.detach(), trained)

  def check(self, thoroughly):
    self.check_directory()
    self.check_logits()
    self.check_cache()
    self.check_generation()
    self.check_round_trip()
    config = self.model.model.config
    if config.final_logit_softcapping and config.backbone == "llama" and not config.exit_gate:
      self.check_z_loss()
    if thoroughly:
      self.check_configuration()
      self.check_modes()


def trained_tokenizer():
  """A byte-level BPE of this file's text, as GPT-2's."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False,
                                initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
  tokenizer.train([__file__], trainer)
  return tokenizer


def check_tokenizer(build, scratch, kind, text, eos):
  """AutoTokenizer has the ids of build/tokenize, and of the token that ends a text."""
  made, saved = scratch / "made", scratch / "saved"
  arch, data = ("llama", "arith:3") if kind == "words" else ("lime", f"text:{__file__}")
  flags = ["--layers", "1", "--width", "8", "--heads", "1", "--seq", "40"]
  if kind == "bpe":
    model_dir.make_tiny(made, arch="lime", vocab_size=400)
    trained_tokenizer().save(str(made / "tokenizer.json"))
    data, flags = scratch / "data.bin", ["--init", made, "--seq", "4"]
    data.write_bytes(torch.tensor([20240520, 1, 100] + [0] * 303, dtype=torch.int32).numpy().tobytes())
  run(build / f"train_{arch}", "--data", data, *flags, "--steps", "0", "--out", saved)
  theirs = transformers.AutoTokenizer.from_pretrained(saved, trust_remote_code=True)
  ids = [int(word) for word in run(build / "tokenize", "--tokenizer", saved, said=text).split()]
  expect(f"{kind}: the ids are {ids}, by transformers {theirs(text).input_ids}", ids == theirs(text).input_ids)
  expect(f"{kind}: transformers decodes {theirs.decode(ids)!r}", theirs.decode(ids) == text)
  generation = saved / "generation_config.json"
  known = json.loads(generation.read_text())["eos_token_id"] if generation.exists() else None
  expect(f"{kind}: texts end with {theirs.eos_token_id} and {known}, not {eos}", theirs.eos_token_id == known == eos)


TOKENIZERS = (("words", "4 * ( 2 - 8 ) = <eos>", 2), ("bytes", "Grüße,\n  4 * 2 = 8", None),
              ("bpe", "Grüße,\n  4 * 2 = 8<|endoftext|>the tokenizer", 0))


def main():
  build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build")
  need_program(build / "generate")
  torch.set_num_threads(1)  # the models are tiny
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  cases, seen, failures = list(variants()), set(), 0
  check_complete(cases)
  for seed, options in enumerate(cases):
    need_program(build / trainer(options["arch"])[0])
    kind = options["arch"], options.get("backbone", "llama")
    with tempfile.TemporaryDirectory() as scratch:
      try:
        Case(build, pathlib.Path(scratch), seed, options).check(thoroughly=kind not in seen)
      except (RuntimeError, ValueError, OSError) as problem:
        failures += 1
        print(f"FAILED: {options}: {problem}")
    seen.add(kind)
  for kind, text, eos in TOKENIZERS:
    with tempfile.TemporaryDirectory() as scratch:
      try:
        check_tokenizer(build, pathlib.Path(scratch), kind, text, eos)
      except (RuntimeError, ValueError, OSError) as problem:
        failures += 1
        print(f"FAILED: {problem}")
  total = len(cases) + len(TOKENIZERS)
  print(f"{total - failures} of {total} saved models and tokenizers are the same to crossply and to transformers")
  if peft is None:
    print("skipped: the checks of LoRA, for peft is not importable")
  sys.exit(1 if failures else 0)


if __name__ == "__main__":
  main()
