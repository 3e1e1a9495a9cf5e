"""Checks `analyze --what sae` with NumPy: the autoencoder of sae.safetensors on the values that were dumped.

    build/analyze --model MODEL --data SOURCE --what sae --dump own_value.0 hidden.0 'gate.*' \
        --sae-tokens 2000 --sequences N --length T --seed S --out DIR
    python dev/inside/sae.py DIR

dump: own_value.0 hidden.0 gate.*
flags: --sae-tokens 2000 --sequences 24 --length 48
architectures: satformer relay

in one call of analyze, so that both have the same windows; without gates, leave 'gate.*' out, and hidden.0, which is
the embeddings of a LLaMA, may be left out, too: then MonoScore is not checked. One model at a time.

Everything here is in double from the f32 weights; the program computes in f32. FVE is off by less than 1e-6 for its
rounding. Which features are active can differ where the k-th and the next entry of h, or an entry and 0, are closer
than f32 tells apart, 2e-7 |v - b_d| |W_e|. After a long training that is no rarity: it drives these two together, to
some 1e-7 for the frequent tokens, as long as either explains what the others leave, and where the first layer's values
depend on the token alone, all its occurrences choose alike. What the other choice would change is allowed on top, and
printed; after few --sae-tokens it is nothing, and every number is compared.
"""
import sys

import numpy as np
from values import read, tensors


def check(what, got, want, tolerance):
    difference = np.max(np.abs(np.asarray(got, float) - np.asarray(want, float)), initial=0)
    print(f"  {what}: largest difference {difference:.3g}, allowed {tolerance:.3g}")
    if not difference <= tolerance:
        sys.exit(f"sae: {what} differs: {got} here, {want} there")


def encode(v, weights, k):
    """z; which tokens could choose otherwise in f32; one such other z; which entries could go either way."""
    h = (v - weights["b_d"]) @ weights["W_e"].astype(float) + weights["b_e"]
    order = np.argsort(-h, axis=1, kind="stable")
    sorted_h = np.take_along_axis(h, order, 1)
    z = np.zeros_like(h)
    np.put_along_axis(z, order[:, :k], np.maximum(sorted_h[:, :k], 0), 1)
    sizes = np.linalg.norm(v - weights["b_d"], axis=1) * np.linalg.norm(weights["W_e"], axis=0).max()
    close = 2e-7 * sizes
    close, least = close[:, None], sorted_h[:, k - 1:k]
    either = np.abs(h) < close
    other, unsure = z.copy(), np.zeros(len(h), bool)
    if k < h.shape[1]:
        unsure = (sorted_h[:, k - 1] - sorted_h[:, k] < close[:, 0]) & (sorted_h[:, k - 1] > 0)
        other[unsure, order[unsure, k - 1]] = 0
        other[unsure, order[unsure, k]] = np.maximum(sorted_h[unsure, k], 0)
        either |= unsure[:, None] & (np.abs(h - least) < close)
    return z, unsure, other, either & (h > least - close) & (h > -close)


def check_fve(what, v, weights, z, unsure, other, there):
    """A context-free value that is unsure may be that of thousands of tokens: what the other choice would change is
    allowed, beside rounding."""
    decode = lambda code: code @ weights["W_d"].astype(float) + weights["b_d"]
    variance = ((v - v.mean(0)) ** 2).sum()
    losses = ((v - decode(z)) ** 2).sum(1)
    others = ((v[unsure] - decode(other[unsure])) ** 2).sum(1)
    unexplained = losses.sum() / variance  # whose rounding is a share of itself: after 2,000 tokens it may be 40
    check(what, 1 - unexplained, there, 1e-6 * max(1, unexplained) + np.abs(others - losses[unsure]).sum() / variance)


def check_features(model, z, tokens, embedding):
    """Counts, dropping, top tokens, MonoScore and order of the features, all over again."""
    counts = (z > 0).sum(0)
    rare = counts < model["min_activations"]
    dense = ~rare & (counts > model["max_density"] * len(tokens))
    scored = []
    for j in np.flatnonzero(~rare & ~dense):
        most = {}
        for t in np.flatnonzero(z[:, j] > 0):
            most[tokens[t]] = max(most.get(tokens[t], 0), z[t, j])
        top = sorted(most, key=lambda token: (-most[token], token))[:20]
        if len(top) == 1:
            scored.append((1.0, j))
            continue
        rows = np.array([embedding[token] for token in top], float)
        norms = np.linalg.norm(rows, axis=1)
        cosines = rows @ rows.T / np.outer(norms, norms)
        scored.append((cosines[np.triu_indices(len(top), 1)].mean(), j))
    check("rare features", rare.sum(), model["rare"], 0)
    check("dense features", dense.sum(), model["dense"], 0)
    check("scored features", len(scored), model["scored"], 0)
    check("of one token", sum(len(set(tokens[z[:, j] > 0])) == 1 for _, j in scored), model["of_one_token"], 0)
    mine = {j: score for score, j in scored}
    best = sorted((score for score, _ in scored), reverse=True)[:len(model["retained"])]
    check("number kept", len(best), int(np.ceil(0.2 * len(scored) - 1e-9)), 0)
    # Tokens of nearly equal activation can change places at the end of the 20 top ones.
    there = [one["mono_score"] for one in model["retained"]]
    off = np.abs(np.array([mine[one["feature"]] for one in model["retained"]]) - there) > 1e-6
    print(f"  MonoScore: {off.sum()} of {len(off)} differ by more than 1e-6")
    if off.sum() > 0.02 * len(off):
        sys.exit("sae: MonoScores differ")
    if not off.any():
        check("best MonoScores", there, best, 1e-6)


def check_gates(model, values, z, either, held, lengths):
    """G of each layer and category over the tokens that were held out."""
    names = ["Semantic", "Functional", "Structural"]
    first = len(lengths) - model["held_out_windows"]
    for one in model["gates"]:
        gate = values[f"gate.{one['layer']}"]
        gates = np.concatenate([gate[i, :lengths[i]].reshape(lengths[i], -1).mean(1, dtype=float)
                                for i in range(first, len(lengths))])
        check(f"gate {one['layer']}, all tokens", gates.mean(), one["all"], 1e-6 * (1 + abs(gates.mean())))
        for name in names:
            features = [f["feature"] for f in model["retained"] if f.get("category") == name]
            w, w_unsure = (z[held:][:, features] > 0).sum(1), either[held:][:, features].sum(1)
            if w.sum() == 0:
                assert one[name] is None
            else:
                G = (w * gates).sum() / w.sum()
                unsure = (w_unsure * np.abs(gates - G)).sum() / w.sum()
                check(f"gate {one['layer']}, {name}", G, one[name], 1e-6 * (1 + abs(G)) + 1.1 * unsure)


def main(folder):
    values, found = read(folder, "sae")
    weights = tensors(f"{folder}/sae.safetensors")
    assert len(found["models"]) == 1, "one model at a time"
    model = found["models"][0]
    drawn, held = len(values["lengths"]), model["held_out_windows"]
    used = [*model["train_windows"], *range(drawn - held, drawn)]  # none of the former overlaps one of the latter
    values = {name: tensor[used] if len(tensor) == drawn else tensor for name, tensor in values.items()}
    lengths, raw = values["lengths"], values["own_value.0"]
    rows = np.concatenate([raw[i, :n].reshape(n, -1) for i, n in enumerate(lengths)]).astype(float)
    tokens = np.concatenate([values["tokens"][i, :n] for i, n in enumerate(lengths)])
    held = int(lengths[:len(lengths) - model["held_out_windows"]].sum())
    D, m, k = rows.shape[1], weights["W_d"].shape[0], int(weights["k"][0])
    assert (D, m, k) == (model["width"], model["dictionary"], model["active"])
    scale = np.sqrt(D / (rows[:held] ** 2).sum(1).mean())
    check("scale", weights["scale"][0] / scale, 1, 1e-6)
    check("rows of W_d", np.linalg.norm(weights["W_d"].astype(float), axis=1), np.ones(m), 1e-5)
    v = rows * weights["scale"][0]
    z, unsure, other, either = encode(v, weights, k)
    counts = either.sum()
    for what, part in ("train", slice(held)), ("held_out", slice(held, None)):
        check_fve(f"FVE, {what}", v[part], weights, z[part], unsure[part], other[part], model[what]["fve"])
    activations = (z > 0).sum(0)
    difference = np.abs(activations - model["activations"]).sum()
    print(f"  activations: {difference} of {activations.sum()} differ, {counts} are unsure in f32")
    if difference > counts:
        sys.exit("sae: activations differ")
    check("features on a token", (z > 0).sum(1).mean(), model["active_on_a_token"], counts / len(v))
    check("live features", (activations > 0).sum(), model["live_features"], counts)
    if "hidden.0" in values and model["backbone"] == "llama" and difference == 0:
        embedding = {token: row for i, n in enumerate(lengths)
                     for token, row in zip(values["tokens"][i, :n], values["hidden.0"][i, :n])}
        check_features(model, z, tokens, embedding)
    check_gates(model, values, z, either, held, lengths)
    print("sae: agrees")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
