"""modded-nanogpt's forward passes around the layers of transformers' LLaMA: two lanes, a saved stream, mixtures at the
end.

Theirs are written for 11 layers: ours are put at some of them, the middle one at 7, the others put out 0. What is
called are three versions of GPT.forward, two from the logs of records, with a stand-in for `self` whose attention and
feed-forward are LLaMA's. Not ours, and taken out: all norms in the stream, the embeddings of bigrams, the smearing, the
value tables, gates, the skip at layer 6, x0 in what attention puts out, and the cap of logits.
"""
import types

import torch
from torch import nn

from . import common
from .nanochat import UnitRms

ABOUT = "KellerJordan/modded-nanogpt"
ARCHITECTURES = "shortcuts with lanes_from, attn_saved, mudd_tail"
CHECKOUTS, PACKAGES = {"modded-nanogpt": "f411b3d346aa52d3504324ca93c230fd84c6c07f"}, ""
RECORDS = "records/track_1_short"
SCRIPTS = dict(lanes=f"{RECORDS}/2026-02-12_ParallelResiduals/451050db-d471-49db-b19b-be824bb896d0.txt",
               saved=f"{RECORDS}/2026-03-06_SimplifyHC/0ab4a843-8c3a-4fb4-9fff-8e1d39852646.txt", tail="train_gpt.py")
THEIRS, MIDDLE, NO_ATTENTION = 11, 7, 6  # their layers, the one whose stream is kept, and the one without attention


def load(root):
  global llama, scripts
  from transformers.models.llama import modeling_llama as llama

  given = dict(norm=lambda x: x, AttnArgs=types.SimpleNamespace, args=types.SimpleNamespace(bigram_dim=0),
               ForwardScheduleConfig=object)
  scripts = {name: common.parts_of_script(root / "modded-nanogpt" / path, ("GPT",), **given)
             for name, path in SCRIPTS.items()}


def models():
  plain = dict(arch="shortcuts", value_embeds="none", resid=False, x0=False)
  depths = [dict(num_hidden_layers=L, attn_saved=L // 2) for L in (4, 3, 5, 6, 7)]
  depths.append(dict(depths[0], **common.OTHER_SHAPES[2]))
  for options in common.crossed(lanes_from=(1, 2, 3), K=(4, 2), tied=(True, False), backout=(True, False),
                                seed=range(2)):
    yield "shortcuts, lanes_from", dict(**plain, **options)
  for depth in depths:
    for options in common.crossed(K=(4, 1), tied=(True, False), backout=(True, False), seed=(0,)):
      yield "shortcuts, attn_saved", dict(**plain, **depth, **options)
    for options in common.crossed(mudd_tail=("both",), K=(4,), tied=(True, False), seed=range(2)):
      yield "shortcuts, mudd_tail both", dict(**plain, **depth, backout=False, mudd_width=5, embed_norm=True,
                                                   **options)
    for options in common.crossed(mudd_tail=("residual",), K=(4, 2), tied=(True, False), seed=range(2)):
      yield "shortcuts, mudd_tail residual", dict(**plain, **depth, backout=False, mudd_width=5, **options)


def places(L):
  """Where their 11 layers are ours: L // 2 below the middle one, the rest at the end."""
  return [*range(NO_ATTENTION - L // 2, NO_ATTENTION), MIDDLE, *range(THEIRS - (L - L // 2 - 1), THEIRS)]


class Modded(nn.Module):
  def __init__(self, config):
    super().__init__()
    L, C, self.config = config.num_hidden_layers, config.hidden_size, config
    self.trunk = llama.LlamaForCausalLM(common.llama_config(config))
    self.at = {place: layer for layer, place in enumerate(places(L))}
    if config.backout:
      self.backout_lambda = nn.Parameter(torch.zeros(1))
    if config.lanes_from:
      self.lane_resid = nn.Parameter(torch.zeros(L - config.lanes_from, 2))
      self.lane_post = nn.Parameter(torch.zeros(L - config.lanes_from, 2, 2))
    if config.mudd_tail != "none":
      self.mudd_w1 = nn.Parameter(torch.zeros(2, config.mudd_width, C))
      self.mudd_w2 = nn.Parameter(torch.zeros(2, 14, config.mudd_width))
      self.mudd_b2 = nn.Parameter(torch.zeros(2, 14))

  def embed(self, tokens):
    x = self.trunk.model.embed_tokens(tokens)
    return UnitRms(x.shape[-1], self.config.rms_norm_eps)(x) if self.config.embed_norm else x

  def attention(self, x, attn_args, place, *_):
    """place: in the place of weights, a tensor of the number of their layer."""
    if (layer := self.at.get(int(place.flatten()[0]))) is None:
      return torch.zeros_like(x)
    layer, sequences = self.trunk.model.layers[layer], x.view(*self.shape, -1)
    added = getattr(attn_args, "aux_v", None)
    if added is not None and self.config.mudd_tail == "both":
      hook = layer.self_attn.v_proj.register_forward_hook(lambda _, __, v: v + added.view(v.shape))
    positions = torch.arange(self.shape[1])[None]
    y = layer.self_attn(layer.input_layernorm(sequences), attention_mask=None,
                        position_embeddings=self.trunk.model.rotary_emb(sequences, positions))[0]
    if added is not None and self.config.mudd_tail == "both":
      hook.remove()
    return y.view(x.shape)

  def mlp(self, x, place, *_):
    if (layer := self.at.get(int(place.flatten()[0]))) is None:
      return torch.zeros_like(x)
    layer = self.trunk.model.layers[layer]
    return layer.mlp(layer.post_attention_layernorm(x))

  def head(self, x):
    self.logits = self.trunk.lm_head(self.trunk.model.norm(x))
    return self.logits

  def lanes(self):
    """Factors of both lanes, and of what goes into each, by their sublayers."""
    kept, post, first = torch.ones(THEIRS, 2), torch.ones(THEIRS, 2, 2), self.config.lanes_from
    if first:
      with_lanes = places(self.config.num_hidden_layers)[first:]
      kept = kept.index_copy(0, torch.tensor(with_lanes), self.lane_resid)
      post = post.index_copy(0, torch.tensor(with_lanes), self.lane_post)
    return kept, post

  def stand_in(self, script, count):
    """What their forward reads of `self`. count: tokens."""
    config, C, zeros = self.config, self.config.hidden_size, torch.zeros
    (kept, post), tail = self.lanes(), config.mudd_tail != "none"
    backout = self.backout_lambda if config.backout else zeros(1)
    gate, everywhere = nn.Linear(1, 1, bias=False), torch.arange(THEIRS)
    attending = everywhere if config.lanes_from else everywhere[everywhere != NO_ATTENTION]
    first = places(config.num_hidden_layers)[config.lanes_from]
    stand_in = types.SimpleNamespace(
      training=False, num_layers=THEIRS, vocab_size=config.vocab_size, embed=self.embed, lm_head=self.head,
      scalars=torch.cat([zeros(2 * THEIRS + 1), *([] if tail else [backout]), torch.full((1,), -torch.inf)]),
      smear_gate=gate, skip_gate=gate, value_embeds=zeros(5 * config.vocab_size, C), paired_head_layers=(), yarn=None,
      attn=self.attention, attn_bank=attending, mlp_bank=everywhere.view(-1, 1, 1, 1).expand(-1, 2, 1, 1),
      attn_gate_bank=zeros(10), ve_gate_bank=zeros(5, config.num_attention_heads, 12),
      bigram_embed=lambda _: zeros(count, 0 if tail else C), bigram_lambda=zeros(2 * THEIRS),
      bigram_lambdas=zeros(THEIRS), x0_lambda=zeros(2 * THEIRS), x0_lambdas=zeros(THEIRS),
      # of two lanes
      _compute_bigram_hash=lambda tokens: tokens, parallel_start=first, resid_lambda=kept.flatten(),
      w_post=post.flatten(0, 1)[..., None], layer_to_attn_idx=range(THEIRS), layer_to_mlp_idx=range(THEIRS),
      blocks=[types.SimpleNamespace(attn=self.attention, mlp=self.mlp)] * THEIRS,
      # of a saved stream, and of mixtures
      resid_lambdas=kept, post_lambdas=torch.ones(THEIRS, 2), gate_filler_nones=[None] * 5, _num_attn_layers=10,
      _num_qk_groups=10, qk_bank=attending.view(-1, 1, 1), vo_bank=zeros(20, 1, 1), cache_layers=(3, MIDDLE),
      bigram_sign_table=zeros(1, 0), forward_mudd_gate=lambda x, id, num_coef: zeros(*x.shape[:2], num_coef),
      _mudd_gate_pre_num_coef=41, _mudd_gate_post_num_coef=41, unpack_pre_mudd_gate=no_gates,
      unpack_post_mudd_gate=lambda *_: 0.0, dc_layers=(), attn_gate_layers=(),
      num_heads=config.num_attention_heads, head_dim=C // config.num_attention_heads, _mudd_scale=0.1)
    if tail:
      stand_in.mudd_w1, stand_in.mudd_w2, stand_in.mudd_b2 = self.mudd_w1, self.mudd_w2, self.mudd_b2
      stand_in.forward_mudd = types.MethodType(script.GPT.forward_mudd, stand_in)
    return stand_in

  def forward(self, tokens):
    config, flat, self.shape = self.config, tokens.flatten(), tokens.shape
    script = scripts["tail" if config.mudd_tail != "none" else "lanes" if config.lanes_from else "saved"]
    script.ReLUSqrdMLP = self.mlp
    schedule = types.SimpleNamespace(mtp_weights=None, train_max_seq_len=0, prefix_weight=0, ws_short=1, ws_long=2)
    rest = () if config.lanes_from else (flat,)
    script.GPT.forward(self.stand_in(script, len(flat)), flat, flat, None, *rest, schedule)
    return self.logits.view(*self.shape, -1)


def no_gates(gate, xsa_alphas, attn_gates, x0_gates, bigram_gates):
  x0_gates[:] = bigram_gates[:] = [0.0] * THEIRS


def build(config):
  return Modded(config)


def weights(config, w):
  """Of the numbers of mixtures, theirs have those of values first, and gates, here 1 or 0, behind them."""
  rest = {name: tensor for name, tensor in w.items() if "mudd_tail" not in name}
  out = common.renamed(rest)
  out = {name.removeprefix("model.") if "lambda" in name or "lane_" in name else f"trunk.{name}": tensor
         for name, tensor in out.items()}
  if config.mudd_tail != "none":
    def numbers(name, fill):
      first, last = (w[f"model.mudd_tail.{i}.{name}"] for i in range(2))
      own, values, width = first[:3], first[3:], first.shape[1:]
      values = values if len(values) else torch.zeros(3, *width)
      gates = [torch.full((1, *width), fill * factor) for factor in (0, 0, 1, 1, 0, 0, 1, 1)]
      return torch.stack([torch.cat([values, own, *gates]), torch.cat([last, torch.zeros(11, *width)])])

    out["mudd_w1"] = torch.stack([w[f"model.mudd_tail.{i}.w1.weight"] for i in range(2)])
    out["mudd_w2"], out["mudd_b2"] = numbers("w2.weight", 0.0), numbers("bias", 10.0)
  return out
