"""A GPT with experts in plain torch: every expert computes every token, and a mask chooses.

Shares no code with fastpar: weights come from a state_dict, gradients from autograd.
"""

import math

import torch
import torch.nn.functional as F


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swiglu(x):
    gate, up = x.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


ACTIVATIONS = {"gelu": gelu, "relu2": lambda x: x * x * (x > 0), "swiglu": swiglu}


def mixture(x, w, config, state, out):
    """[N, C] -> [N, C]; out gets the losses of this layer's tokens and the counts."""
    logits = x @ w["router.weight"].T
    scores = logits + config.balance_rate * w["router.steps"]
    E, K = config.n_expert, config.top_k
    # The K best, the lower number of equal ones: by counting who is better.
    better = (scores[:, None, :] > scores[:, :, None]) | (
        (scores[:, None, :] == scores[:, :, None])
        & (torch.arange(E)[None, None, :] < torch.arange(E)[None, :, None])
    )
    chosen = better.sum(-1) < K  # [N, E]
    p = logits.softmax(-1)
    weights = torch.where(chosen, p, torch.zeros_like(p))
    if K > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    out["counts"].append(chosen.sum(0))
    if config.expert_capacity is not None:
        most = max(1, math.ceil(config.expert_capacity * len(x) * K / E))
        kept = chosen & (chosen.cumsum(0) <= most)
        out["dropped"] += int((chosen & ~kept).sum())
        weights = torch.where(kept, weights, torch.zeros_like(weights))
    load = w["router.load"].to(x.dtype)
    share = load / load.sum() if load.sum() else torch.full_like(load, 1 / E)
    out["losses"] += config.balance_loss * E * (share * p).sum()
    out["losses"] += config.router_z_loss * logits.logsumexp(-1).square().sum()
    y = torch.zeros_like(x)
    first, last = (w.get(f"{name}.bias", torch.zeros(E, 1)) for name in ("c_fc", "c_proj"))
    for e in range(E):
        h = ACTIVATIONS[config.activation](x @ w["c_fc.weight"][e].T + first[e])
        y = y + weights[:, e : e + 1] * (h @ w["c_proj.weight"][e].T + last[e])
    return y


def norm(x, w, name):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"))


def linear(x, w, name):
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def loss_of(weights, config, idx, targets, out):
    """The sum of the cross-entropy over the targets of one micro-batch."""

    def below(prefix):
        return {n[len(prefix) :]: p for n, p in weights.items() if n.startswith(prefix)}

    x = weights["wte.weight"][idx] + weights["wpe.weight"][: idx.shape[1]]
    for layer in range(config.n_layer):
        w = below(f"h.{layer}.")
        y = norm(x, w, "ln_1")
        qkv = linear(y, w, "attn.c_attn").unflatten(-1, (3, config.n_head, -1))
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(o, w, "attn.c_proj")
        y = norm(x, w, "ln_2")
        w = {n[4:]: p for n, p in w.items() if n.startswith("mlp.")}
        if "router.weight" in w:
            x = x + mixture(y.flatten(0, 1), w, config, weights, out).view(y.shape)
        else:
            x = x + linear(ACTIVATIONS[config.activation](linear(y, w, "c_fc")), w, "c_proj")
    logits = (norm(x, weights, "ln_f") @ weights["wte.weight"].T)[..., : config.vocab_size]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def step(weights, config, batches):
    """Mean loss and gradients of one step over micro-batches, and what was counted.

    Changes router.load and router.steps as a step does.
    """
    leaves = {n: p.detach().clone() for n, p in weights.items()}
    for p in leaves.values():
        p.requires_grad_(p.is_floating_point())
    out = {"losses": 0.0, "dropped": 0, "counts": []}
    total, tokens = 0.0, 0
    for idx, targets in batches:
        total = total + loss_of(leaves, config, idx, targets, out)
        tokens += int((targets != -100).sum())
    ((total + out["losses"]) / tokens).backward()
    grads = {n: p.grad for n, p in leaves.items() if p.grad is not None}
    names = sorted((n for n in weights if n.endswith(".load")), key=lambda n: int(n.split(".")[1]))
    counts = torch.stack(out["counts"]).view(len(batches), len(names), -1).sum(0)
    for name, count in zip(names, counts):
        weights[name] = count
        steps = name.replace("load", "steps")
        if config.balance_rate:
            weights[steps] = weights[steps] + torch.sign(count.sum() - len(count) * count)
    return (total / tokens).detach(), grads, counts, out["dropped"]
