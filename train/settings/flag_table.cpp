// The rows: to find out what a flag does, search for its member.
#include "train/settings/flag_table.h"

#include <algorithm>

#include "data/document_marks.h"
#include "data/document_shuffle.h"
#include "engine/tape.h"
#include "train/settings/gpus.h"

namespace crossply {
namespace flag_rows {

using S = Settings&;
using M = Member;
constexpr Resume fixed = Resume::fixed, may_grow = Resume::may_grow, free_ = Resume::free, of_model = Resume::of_model,
                 this_call = Resume::this_call;

Takes from(double min, double max) { return {min, max}; }
Takes any_of(std::vector<std::string> words) { return {0, 0, std::move(words)}; }
Takes text(const char* type) { return {0, 0, {}, type}; }
const Takes count = from(0, max_count), number = from(0, max_number), truth, given = {0, 0, {}, "", true};

const std::vector<Need> beside_muon = {{"--optimizer", {"muon", "normuon"}}}, beside_teacher = {{"--teacher"}},
                        beside_world = {{"--world"}}, beside_loop = {{"--loop", {"anchor"}}},
                        beside_any_loop = {{"--loop", {"anchor", "stack"}}}, beside_stack = {{"--loop", {"stack"}}},
                        beside_engram = {{"--engram-layers"}}, beside_transfer = {{"--transfer", {"mup", "completep"}}},
                        beside_completep = {{"--transfer", {"completep"}}};
bool has_teacher(const Settings& settings) { return !settings.teacher.empty(); }
bool trains_by_muon(const Settings& settings) { return has_muon(settings.optimizer); }
bool transfers_rates(const Settings& settings) { return settings.transfer.rule != "none"; }
bool cools_down(const Settings& settings) { return has_cooldown(settings.schedule); }

// clang-format off
const std::vector<FlagRow> data = {
    {"--preset", free_, [](S s) -> M { return &s.preset; }, text("NAME"),
     "a paper's setting (--list-presets); other flags change it"},
    {"--data", fixed, [](S s) -> M { return &s.data.spec; }, text("SOURCE"), data_specs},
    {"--tokenizer", fixed, [](S s) -> M { return &s.data.tokenizer; }, text("FILE"),
     "tokenizer.json, or a directory that has one, for text: (default: that of the model it starts from, or bytes)"},
    {"--val-data", fixed, [](S s) -> M { return &s.data.val_spec; }, text("GLOB"),
     "validation shards (default: those of a directory that prepare wrote, otherwise the end of --data)"},
    {"--shuffle", fixed, [](S s) -> M { return &s.data.shuffle; }, any_of(shuffles),
     "windows: each epoch the same ones in another order; documents: cut anew out of documents in another order"},
    {"--documents", fixed, [](S s) -> M { return &s.data.documents; }, any_of(document_marks),
     "tokens attend within their document, which begins after or before the token --eot; auto: before where the data "
     "begins with it; none: rows are not divided"},
    {"--eot", fixed, [](S s) -> M { return &s.data.eot; }, from(-1, max_size),
     "id of the token between documents (-1: the tokenizer's)",
     {{"--shuffle", {"documents"}}, {"--documents", {"auto", "after", "before"}}}},
    {"--train-samples", fixed, [](S s) -> M { return &s.data.train_samples; }, count,
     "size of a generated training set (0: the task's own)"},
    {"--test-samples", fixed, [](S s) -> M { return &s.data.test_samples; }, count,
     "size of a generated test set (0: the task's own)"},
    {"--seq", fixed, [](S s) -> M { return &s.data.seq_len; }, from(0, max_size),
     "T, tokens per sequence (0: a task's longest; of files without this flag, by their size)"},
    {"--seed", fixed, [](S s) -> M { return &s.seed; }, from(0, 0x1p63),
     "of initialisation, data and its order"}};

const std::vector<FlagRow> model = {
    {"--init", fixed, [](S s) -> M { return &s.init; }, text("DIR"),
     "start from this model: weights, sizes and tokenizer, which also encodes prosqa and arith; --layers takes its "
     "first blocks"},
    {"--vocab", of_model, [](S s) -> M { return &s.config.vocab_size; }, from(0, max_size),
     "V, vocabulary size (0: the data's)"},
    {"--width", of_model, [](S s) -> M { return &s.config.hidden_size; }, from(1, max_size), "C, model width"},
    {"--layers", of_model, [](S s) -> M { return &s.config.num_hidden_layers; }, from(1, 4096), "L, number of blocks"},
    {"--heads", of_model, [](S s) -> M { return &s.config.num_attention_heads; }, from(1, max_size), "H, query heads"},
    {"--kv-heads", of_model, [](S s) -> M { return &s.config.num_key_value_heads; }, from(0, max_size),
     "K, key/value heads (0: H)"},
    {"--head-width", of_model, [](S s) -> M { return &s.config.head_dim; }, from(0, max_size),
     "D, head width (0: C / H)"},
    {"--ffn", of_model, [](S s) -> M { return &s.config.intermediate_size; }, from(1, max_size),
     "F, feed-forward width", {}, {}, "llama"},
    {"--ffn", of_model, [](S s) -> M { return &s.config.intermediate_size; }, from(0, max_size),
     "F, feed-forward width (0: 4 C)", {}, {}, "gpt2"},
    {"--rope-theta", of_model, [](S s) -> M { return &s.config.rope_theta; }, number,
     "base of the rotary frequencies", {}, {}, "llama"},
    {"--norm-eps", of_model, [](S s) -> M { return &s.config.norm_eps; }, number, "epsilon of the norms"},
    {"--tie", of_model, [](S s) -> M { return &s.config.tie_word_embeddings; }, truth,
     "head and embedding share one matrix"},
    {"--qk-norm", of_model, [](S s) -> M { return &s.config.qk_norm; }, truth, "RMSNorm on queries and keys"},
    {"--attention-window", of_model, [](S s) -> M { return &s.config.sliding_window; }, from(0, max_size),
     "in layers that slide, tokens see so many last ones, themselves among them (0: all, in all layers)"},
    {"--attention-window-pattern", of_model, [](S s) -> M { return &s.config.window_pattern; }, text("SSSL"),
     "which layers slide (S) and which see all (L), repeated over the layers, the last of which sees all; with a "
     "letter for each layer taken as it is", {{"--attention-window"}}},
    {"--loop", of_model, [](S s) -> M { return &s.config.loop.kind; }, any_of({"none", "anchor", "stack"}),
     "anchor: blocks in the middle run several times, and after each pass the stream is normalised and the stream "
     "before them is added; once by default, which is Operator-1. stack: the whole model runs several times"},
    {"--loop-passes", of_model, [](S s) -> M { return &s.config.loop.passes; }, from(1, 4096),
     "R, how often the core runs, or the model", beside_any_loop},
    {"--loop-layers", of_model, [](S s) -> M { return &s.config.loop.layers; }, text("[P,M,Q]"),
     "blocks before the core, in it and behind it ([]: thirds)", beside_loop},
    {"--loop-tied", of_model, [](S s) -> M { return &s.config.loop.tied; }, truth,
     "all passes have the same blocks; false: each its own, and --loop-layers must be given", beside_loop},
    {"--loop-norm", of_model, [](S s) -> M { return &s.config.loop.norm; }, any_of({"none", "passes", "all"}),
     "of the stream: after each pass, and with all after the prelude, too", beside_loop},
    {"--loop-alpha", of_model, [](S s) -> M { return &s.config.loop.alpha; }, from(-max_number, max_number),
     "what the stream before the core is multiplied by (0: it is not added)", beside_loop},
    {"--loop-end", of_model, [](S s) -> M { return &s.config.loop.end; }, truth,
     "add it after the last pass, too", beside_loop},
    {"--exit-gate", of_model, [](S s) -> M { return &s.config.loop.exit_gate; }, truth,
     "a gate says of each token after which pass it may leave, and training weighs the passes' losses by it",
     beside_stack},
    {"--exit-beta", of_model, [](S s) -> M { return &s.config.loop.exit_beta; }, number,
     "what the entropy of these weights counts in the loss", {{"--exit-gate", {"true"}}}},
    {"--block-norm", of_model, [](S s) -> M { return &s.config.block_norm; }, any_of({"pre", "branch", "sum"}),
     "pre: norms are in front of sublayers alone; branch: a second one on their output; sum: on the stream after it"},
    {"--logit-softcap", of_model, [](S s) -> M { return &s.config.final_logit_softcapping; }, from(0, 1e6),
     "C: logits z become C tanh(z / C), as in Gemma 2 (0: they stay)"},
    {"--engram-layers", of_model, [](S s) -> M { return &s.config.engram.layers; }, text("[...]"),
     "in front of these, from 0, the stream takes in what tables say of the last tokens ([]: of none); of a loop, "
     "applications of blocks. With --init it is added to a model that has none"},
    {"--engram-order", of_model, [](S s) -> M { return &s.config.engram.order; }, from(2, 16),
     "the most tokens that are looked up together; fewer, from two on, are, too", beside_engram},
    {"--engram-heads", of_model, [](S s) -> M { return &s.config.engram.heads; }, from(1, 1024),
     "hashes of so many tokens, each with a table of its own", beside_engram},
    {"--engram-width", of_model, [](S s) -> M { return &s.config.engram.width; }, from(0, max_size),
     "of all that is looked up for a token (0: C)", beside_engram},
    {"--engram-rows", of_model, [](S s) -> M { return &s.config.engram.rows; }, from(2, 1 << 28),
     "least size of each table", beside_engram},
    {"--engram-boundary", of_model, [](S s) -> M { return &s.config.engram.boundary; }, text("[...]"),
     "tokens that end a document, beyond which nothing is looked up", beside_engram},
    {"--engram-pad-id", of_model, [](S s) -> M { return &s.config.engram.pad_id; }, from(0, max_size),
     "token that stands for those beyond the beginning", beside_engram},
    {"--engram-seed", of_model, [](S s) -> M { return &s.config.engram.seed; }, from(0, 0x1p63), "of the hashes",
     beside_engram},
    {"--engram-map", of_model, [](S s) -> M { return &s.config.engram.map; }, text("FILE"),
     "which tokens are taken for the same, from data/engram_map.py (none: each is one of its own)", beside_engram},
    {"--engram-multipliers", of_model, [](S s) -> M { return &s.config.engram.multipliers; }, text("[[...]...]"),
     "of the hashes, odd, --engram-order for each layer, in place of the seed's", beside_engram},
    {"--backbone", of_model, [](S s) -> M { return &s.config.backbone; }, any_of({"llama", "gpt2"}),
     "the block: llama or gpt2"},
    {"--positions", of_model, [](S s) -> M { return &s.config.max_position_embeddings; }, from(0, max_size),
     "P, learned positions (0: T)", {}, {}, "gpt2"},
    {"--bias", of_model, [](S s) -> M { return &s.config.bias; }, truth, "biases in norms and products", {}, {},
     "gpt2"},
    {"--activation", of_model, [](S s) -> M { return &s.config.activation_function; }, any_of({"gelu_new", "gelu"}),
     "gelu_new (by tanh) or gelu (exact)", {}, {}, "gpt2"},
    {"--scale-attn-by-layer", of_model, [](S s) -> M { return &s.config.scale_attn_by_inverse_layer_idx; }, truth,
     "divide the attention logits of layer i (from 0) by i + 1, too", {}, {}, "gpt2"}};

const std::vector<FlagRow> distillation = {
    {"--teacher", fixed, [](S s) -> M { return &s.teacher; }, text("DIR"),
     "learn also from the logits of this model, of any sizes and architecture but the same vocabulary; with --resume, "
     "where it is now"},
    {"--kd-alpha", fixed, [](S s) -> M { return &s.kd.alpha; }, from(0, 1),
     "A: the loss is A CE + (1 - A) TAU^2 KL(teacher || student)", beside_teacher, {}, "", has_teacher},
    {"--kd-tau", fixed, [](S s) -> M { return &s.kd.tau; }, from(min_tau, max_tau),
     "TAU, temperature of both in the KL divergence", beside_teacher, {}, "", has_teacher},
    {"--kd-reduction", fixed, [](S s) -> M { return &s.kd_reduction; }, any_of(reductions),
     "of the KL divergence: mean over tokens, or over tokens and vocabulary", beside_teacher, {}, "", has_teacher}};

const std::vector<FlagRow> optimizer = {
    {"--steps", may_grow, [](S s) -> M { return &s.steps; }, count,
     "optimizer steps (of files without this flag, by their size); 0 writes an initialised model directory"},
    {"--batch", fixed, [](S s) -> M { return &s.batch; }, from(1, max_size), "sequences per micro-step"},
    {"--accumulate", fixed, [](S s) -> M { return &s.accumulate; }, from(1, max_size),
     "micro-steps per optimizer step"},
    {"--lr", fixed, [](S s) -> M { return &s.lr; }, number,
     "base learning rate (of files without this flag, by the model's size)"},
    {"--optimizer", fixed, [](S s) -> M { return &s.optimizer; }, any_of(optimizers),
     "adamw, or muon or normuon for hidden weight matrices: all other parameters are AdamW's then"},
    {"--muon-lr", fixed, [](S s) -> M { return &s.muon.lr; }, number,
     "Muon's base learning rate (0: with --muon-scale rms five times --lr, with original 0.03)",
     beside_muon, {}, "", trains_by_muon},
    {"--muon-scale", fixed, [](S s) -> M { return &s.muon.scale; }, any_of(muon_scales),
     "size of Muon's step for an (m, n) matrix: rms, 0.2 sqrt(max(m, n)); original, sqrt(max(1, m/n)); spectral, "
     "sqrt(m/n)",
     beside_muon, {}, "", trains_by_muon},
    {"--muon-momentum", fixed, [](S s) -> M { return &s.muon.momentum; }, from(0, max_beta), "Muon's momentum",
     beside_muon, {}, "", trains_by_muon},
    {"--muon-nesterov", fixed, [](S s) -> M { return &s.muon.nesterov; }, truth, "Nesterov's form of it",
     beside_muon, {}, "", trains_by_muon},
    {"--momentum-warmup", fixed, [](S s) -> M { return &s.muon.momentum_warmup; }, count,
     "steps in which Muon's momentum rises from 0.85",
     beside_muon, {}, "", trains_by_muon},
    {"--muon-polynomial", fixed, [](S s) -> M { return &s.muon.polynomial; }, any_of(muon_polynomials),
     "coefficients of Newton-Schulz: jordan or polar_express",
     beside_muon, {}, "", trains_by_muon},
    {"--muon-steps", fixed, [](S s) -> M { return &s.muon.steps; }, from(0, 100),
     "steps of Newton-Schulz (0: those of the polynomial)",
     beside_muon, {}, "", trains_by_muon},
    {"--router-lr", fixed, [](S s) -> M { return &s.router_lr; }, number,
     "of routers, depth scores and scalars whose learning rate is not --lr; some connections have none, attnres and "
     "mhc among them (0: mostly ten times --lr)"},
    {"--freeze-routers", fixed, [](S s) -> M { return &s.freeze_routers; }, given,
     "routers and scalars stay what they start with: a control, against which their learning is worth something", {},
     {"--router-lr"}},
    {"--z-loss", fixed, [](S s) -> M { return &s.z_loss; }, number,
     "ZETA: training also lowers ZETA mean(lse^2), lse = log sum exp of the logits; the losses shown are without it"},
    {"--schedule", fixed, [](S s) -> M { return &s.schedule; }, any_of(schedules),
     "cosine, cosine_to_floor, cosine_from_zero, linear, constant, or wsd_linear or wsd_sqrt: constant until a "
     "cool-down (train/settings/schedule.h)"},
    {"--cooldown", fixed, [](S s) -> M { return &s.cooldown; }, count,
     "last steps, in which the rate falls (0: a fifth of --steps)", {{"--schedule", {"wsd_*"}}}, {}, "",
     cools_down},
    {"--warmup", fixed, [](S s) -> M { return &s.warmup; }, count, "warm-up steps (of files without this flag, 5 %)"},
    {"--lr-floor", fixed, [](S s) -> M { return &s.lr_floor; }, from(0, 1),
     "smallest multiple of --lr after the warm-up", {{"--schedule", {"!constant"}}}},
    {"--weight-decay", fixed, [](S s) -> M { return &s.adamw.weight_decay; }, number, "decoupled weight decay"},
    {"--decay-all", fixed, [](S s) -> M { return &s.decay_all; }, given,
     "decay norms, embeddings, routers and scalars, too, as SATFormer's code does", {{"--weight-decay"}}},
    {"--cautious-decay", fixed, [](S s) -> M { return &s.adamw.cautious; }, given,
     "decay only weights that the step makes smaller", {{"--weight-decay"}}},
    {"--decay-schedule", fixed, [](S s) -> M { return &s.decay_schedule; }, any_of(decay_schedules),
     "of the weight decay: constant, linear or cosine, both to 0 at the end"},
    {"--beta1", fixed, [](S s) -> M { return &s.adamw.beta1; }, from(0, max_beta), "AdamW's first decay"},
    {"--beta2", fixed, [](S s) -> M { return &s.adamw.beta2; }, from(0, max_beta), "AdamW's second decay"},
    {"--adam-eps", fixed, [](S s) -> M { return &s.adamw.eps; }, number, "AdamW's epsilon"},
    {"--clip", fixed, [](S s) -> M { return &s.adamw.clip; }, number, "largest global gradient norm (0: no clipping)"},
    {"--transfer", fixed, [](S s) -> M { return &s.transfer.rule; }, any_of(transfer_rules),
     "starts, rates, decay and epsilons of rows as they were tuned at a base shape: mup, across widths; completep, "
     "across depths, too (train/settings/transfer.h)"},
    {"--base-width", fixed, [](S s) -> M { return &s.transfer.base_width; }, from(0, max_size),
     "C0, the width that was tuned", beside_transfer, {}, "", transfers_rates},
    {"--base-layers", fixed, [](S s) -> M { return &s.transfer.base_layers; }, from(0, 4096),
     "L0, the depth that was tuned", beside_completep, {}, "", transfers_rates},
    {"--base-head-width", fixed, [](S s) -> M { return &s.transfer.base_head_width; }, from(0, max_size),
     "D0, the width of heads that was tuned (0: the model's)", beside_transfer, {}, "", transfers_rates},
    {"--depth-alpha", fixed, [](S s) -> M { return &s.transfer.depth_alpha; }, from(0.5, 1),
     "how a residual shrinks with depth: (L / L0)^-ALPHA", beside_completep, {}, "", transfers_rates}};

const std::vector<FlagRow> output = {
    {"--out", this_call, [](S s) -> M { return &s.out; }, text("DIR"),
     "run directory: metrics.jsonl, curve.svg, checkpoints", {}, {}, "", nullptr, true},
    {"--resume", this_call, [](S s) -> M { return &s.resume; }, given,
     "continue the run in --out, bit for bit; needs no other flags"},
    {"--branch", this_call, [](S s) -> M { return &s.branch.run; }, text("RUN"),
     "a new run that goes on from the stable phase of this one (--schedule constant or wsd_*), with its flags but for "
     "--steps, --schedule, --cooldown and --lr-floor", {}, {"--resume", "--init", "--preset"}},
    {"--from-step", this_call, [](S s) -> M { return &s.branch.step; }, count,
     "after which step of it (0: its newest checkpoint that suits)", {{"--branch"}}},
    {"--eval-every", free_, [](S s) -> M { return &s.eval_every; }, count,
     "steps between evaluations (0: a tenth of the run)"},
    {"--eval-samples", free_, [](S s) -> M { return &s.eval_samples; }, count,
     "test sequences for the loss, evenly spread (0: all). Without this flag the last evaluation is over all"},
    {"--test-part", fixed, [](S s) -> M { return &s.data.test_part; }, any_of(test_parts), ""},
    {"--eval-rule", free_, [](S s) -> M { return &s.eval_rule; }, any_of(eval_rules), ""},
    {"--answer-samples", free_, [](S s) -> M { return &s.answer_samples; }, count,
     "test prompts to answer by generation (0: none)", {{"--data", {"arith:*", "prosqa*"}}}},
    {"--save-every", free_, [](S s) -> M { return &s.save_every; }, count,
     "steps between checkpoints (0: a tenth of the run)"},
    {"--keep", free_, [](S s) -> M { return &s.keep; }, from(1, max_size), "checkpoints to keep"},
    {"--save-at", free_, [](S s) -> M { return &s.save_at; }, text("TOKENS,..."),
     "also save when so many tokens are reached (1e6,2e6,5e6), and never remove these"},
    {"--tensorboard", free_, [](S s) -> M { return &s.tensorboard; }, given,
     "also write the metrics as event files, to tensorboard/ in --out"},
    {"--csv", free_, [](S s) -> M { return &s.csv; }, given, "also write them as metrics.csv"},
    {"--dry-run", this_call, [](S s) -> M { return &s.dry_run; }, given,
     "print memory, FLOPs and parameters, and stop"},
    {"--time", this_call, [](S s) -> M { return &s.time; }, given,
     "also run three steps, and say how long the run takes", {{"--dry-run"}}},
    {"--dump-tape", this_call, [](S s) -> M { return &s.dump_tape; }, given,
     "print the step, forward and backward, as a table, and stop", {}, {"--dry-run"}},
    {"--dump-tensors", this_call, [](S s) -> M { return &s.dump_tensors; }, text("NAME..."),
     "write these values and gradients (d:NAME; * for any letters) of the next batch to --out DIR/tensors.safetensors, "
     "and stop", {}, {"--branch", "--dry-run", "--dump-tape"}},
    {"--profile", this_call, [](S s) -> M { return &s.profile; }, given,
     "end with time, FLOPs and bytes by op, and the peak of memory", {}, {"--dump-tape", "--dump-tensors"}}};

const std::vector<FlagRow> machine = {
    {"--device", fixed, [](S s) -> M { return &s.device; }, text("NAME"), "cpu or cuda"},
    {"--dtype", fixed, [](S s) -> M { return &s.dtype; }, any_of(dtypes),
     "of activations and products: fp32, or bf16 (with fp32 master weights, moments, gradients)"},
    {"--matmul", fixed, [](S s) -> M { return &s.matmul; }, any_of(matmuls),
     "products of --dtype fp32: fp32, or bf16x3 (split in three on bf16 matrix units of a CPU); of linear layers with "
     "--dtype bf16: fp8, on a GPU that has it"},
    {"--other-gpu", this_call, [](S s) -> M { return &s.other_gpu; }, given,
     "resume also where the GPU, its driver or cuBLAS is another than the checkpoint's; last digits then differ",
     {{"--resume"}}}};

const std::vector<FlagRow> ranks = {
    {"--sum", fixed, [](S s) -> M { return &s.sum; }, any_of(sums),
     "of gradients over micro-steps and ranks: running, tree (the same bits for any number of ranks; copies of the "
     "gradients) or library (by MPI or NCCL)"},
    {"--peer-timeout", free_, [](S s) -> M { return &s.peer_timeout; }, from(1, max_number),
     "seconds of silence after which a rank is lost", {}, {}, "", nullptr, true},
    {"--check-replicas", free_, [](S s) -> M { return &s.check_replicas; }, count,
     "steps between comparisons of the ranks' weights (0: never)"},
    {"--log-ranks", free_, [](S s) -> M { return &s.log_ranks; }, given,
     "also print what other ranks than the first say", {}, {}, "", nullptr, true}};

const std::vector<FlagRow> planning = {
    {"--world", this_call, [](S s) -> M { return &s.world.ranks; }, from(1, 1 << 16),
     "plan a job of so many ranks (memory, bytes sent, time) and start none: mpirun, torchrun or srun does that",
     {{"--dry-run"}, {"--dump-tape"}}},
    {"--node-gpus", this_call, [](S s) -> M { return &s.world.node_gpus; }, from(1, 1 << 10),
     "ranks of a node, a GPU each", beside_world},
    {"--gpu", this_call, [](S s) -> M { return &s.world.gpu; }, any_of(gpu_names()),
     "its peak, memory and links: h100, h200, a100 or b200 (none: h100)", beside_world},
    {"--nvlink", this_call, [](S s) -> M { return &s.world.nvlink; }, from(0, 1e6),
     "GB/s that a GPU sends inside its node (0: the --gpu's)", beside_world},
    {"--net", this_call, [](S s) -> M { return &s.world.net; }, from(0, 1e6),
     "GB/s that a rank sends to other nodes; of CPUs to other ranks (0: that of the --gpu's usual network card)",
     beside_world},
    {"--rank-rate", this_call, [](S s) -> M { return &s.world.rate; }, from(0, 1e12),
     "tokens/s of one rank alone, measured: in its status line, with these sizes and as many threads as a rank will "
     "have (0: assumed from the --gpu's peak)", beside_world}};

const std::vector<FlagRow> for_tests = {
    {"--plan", free_, [](S s) -> M { return &s.plan; }, any_of(plan_modes),
     "memory plan; all give the same numbers"}};
// clang-format on

}  // namespace flag_rows

const std::vector<FlagGroup>& training_flags() {
  using namespace flag_rows;
  static const std::vector<FlagGroup> groups = {
      {"Data", data},           {"Model", model},     {"Distillation", distillation}, {"Optimiser", optimizer},
      {"Output", output},       {"Machine", machine}, {"Several processes", ranks},   {"Planning", planning},
      {hidden_group, for_tests}};
  return groups;
}

std::string FlagRow::key() const {
  std::string key = flag.substr(2);
  std::ranges::replace(key, '-', '_');
  return key;
}

}  // namespace crossply
