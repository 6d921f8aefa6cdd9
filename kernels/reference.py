"""Oracles: every op in plain torch, sharing no code with the kernels.

Each computes in the dtype of its inputs, so that fp64 inputs give the reference value for a
kernel's error. Shape legend: B batch, T time, C n_embd, H heads, D head dim, F 4*C,
V vocabulary, N rows (B*T), P flat parameters, S shard of P.
"""

import math

import torch
from torch import Tensor


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias."""
    y = x @ weight.T
    return y if bias is None else y + bias


def bias_gelu_ref(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """gelu(x + bias), written out."""
    u = x if bias is None else x + bias
    if approximate == "tanh":
        return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    return 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))


def activation_ref(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """gelu, gelu_erf, relu2 or swiglu of x + bias, written out."""
    if kind in ("gelu", "gelu_erf"):
        return bias_gelu_ref(x, bias, approximate="tanh" if kind == "gelu" else "none")
    u = x if bias is None else x + bias
    if kind == "relu2":
        return u.clamp(min=0) ** 2
    gate, up = u.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def route_ref(logits: Tensor, k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights and indices of the k best of each row; of equal ones the lower index."""
    keys = (logits if bias is None else logits + bias).tolist()
    chosen = [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in keys]
    experts = torch.tensor(chosen, dtype=torch.int64, device=logits.device).view(len(keys), k)
    exps = (logits - logits.amax(-1, keepdim=True).detach()).exp()
    among = exps.gather(1, experts) if k > 1 else exps
    return exps.gather(1, experts) / among.sum(-1, keepdim=True), experts


def permute_ref(
    x: Tensor, experts: Tensor, n_expert: int, capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x, expert by expert, those of the first `capacity` slots."""
    flat = experts.flatten()
    slots = [(flat == e).nonzero().flatten()[:capacity] for e in range(n_expert)]
    order = torch.cat(slots)
    counts = torch.tensor([len(s) for s in slots], dtype=torch.int64, device="cpu")
    return x.repeat_interleave(experts.shape[1], 0)[order], order, counts


def combine_ref(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """The weighted sum of each token's rows, by a matrix of weights."""
    spread = rows.new_zeros(weights.numel(), len(order))
    spread[order, torch.arange(len(order), device=rows.device)] = 1.0
    return (spread.view(*weights.shape, -1) * weights.to(rows.dtype)[..., None]).sum(1) @ rows


def grouped_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """The rows of each group by its weight, group by group."""
    parts = []
    for g, rows in enumerate(x.split(counts.flatten().tolist())):
        e = g % len(weight)
        parts.append(linear_ref(rows, weight[e], None if bias is None else bias[e]))
    return torch.cat(parts)


def _capped_ref(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def cross_entropy_ref(
    logits: Tensor, targets: Tensor, *, vocab_size: int | None = None, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """-sum of log softmax(logits[..., :vocab_size]) over the smoothed targets, + z * lse^2."""
    logits = _capped_ref(logits[..., :vocab_size].flatten(0, -2), softcap)  # [N, V]
    shape, targets = targets.shape, targets.reshape(-1)
    valid = targets != ignore_index
    picked = torch.where(valid, targets, torch.zeros_like(targets))
    lse = logits.logsumexp(-1)  # [N]
    losses = (1 - label_smoothing) * (lse - logits.gather(1, picked[:, None])[:, 0])
    if label_smoothing:
        losses = losses + label_smoothing * (lse - logits.mean(-1))
    if z_loss:
        losses = losses + z_loss * lse**2
    losses = torch.where(valid, losses, torch.zeros_like(losses))
    if reduction == "none":
        return losses.view(shape)
    return losses.sum() / valid.sum() if reduction == "mean" else losses.sum()


def linear_cross_entropy_ref(x: Tensor, weight: Tensor, targets: Tensor, **kwargs) -> Tensor:
    """Cross-entropy of x @ weight.T, all logits at once."""
    return cross_entropy_ref(x @ weight.T, targets, **kwargs)


def cross_entropy_shard_ref(
    logits: Tensor, targets: Tensor, *, first: int = 0, vocab_size: int | None = None,
    ignore_index: int = -100, softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Max, sum of exp(logits - max), target's logit (0 if elsewhere); 0, 1, 0 if ignored."""
    targets = targets.reshape(-1)
    classes = first + torch.arange(logits.shape[-1], device=logits.device)
    real = classes < (first + logits.shape[-1] if vocab_size is None else vocab_size)
    rows = _capped_ref(logits.reshape(-1, logits.shape[-1]), softcap)  # [N, V]
    rows = rows.masked_fill(~real, -math.inf)
    top = rows.amax(-1)
    total = (rows - torch.where(top > -math.inf, top, 0.0)[:, None]).exp().sum(-1)
    hit = (classes == targets[:, None]) & real
    target_logit = torch.where(hit, rows, 0.0).sum(-1)
    valid = targets != ignore_index
    parts = ((top, 0.0), (total, 1.0), (target_logit, 0.0))
    top, total, target_logit = (torch.where(valid, x, otherwise) for x, otherwise in parts)
    return top, total, target_logit


def cross_entropy_shard_grad_ref(
    logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, *, first: int = 0,
    vocab_size: int | None = None, ignore_index: int = -100, z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """scale * (softmax * (1 + 2 * z * lse) - onehot) for the classes from `first` on."""
    targets = targets.reshape(-1, 1)
    classes = first + torch.arange(logits.shape[-1], device=logits.device)
    real = classes < (first + logits.shape[-1] if vocab_size is None else vocab_size)
    rows, lse = _capped_ref(logits.reshape(-1, logits.shape[-1]), softcap), lse[:, None]
    grad = (rows - lse).exp() * (1 + 2 * z_loss * lse) - (classes == targets).to(lse.dtype)
    grad = grad * (scale if scale.dim() == 0 else scale[:, None])
    grad = grad * (1 - (rows / softcap) ** 2) if softcap else grad
    return torch.where(real & (targets != ignore_index), grad, 0.0).view(logits.shape)


def adamw_step_ref(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], *,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    grad_scale: float = 1.0, maximize: bool = False, max_exp_avg_sqs: list[Tensor] | None = None,
) -> None:  # fmt: skip
    """One AdamW step in place, as in the paper: decay, moments, corrected update. max_exp_avg_sqs:
    largest second moments so far, which replace the second moments (amsgrad)."""
    largest = max_exp_avg_sqs or exp_avg_sqs
    for p, grad, m, v, max_v in zip(params, grads, exp_avgs, exp_avg_sqs, largest):
        g = grad.to(p.dtype) * (-grad_scale if maximize else grad_scale)
        p.mul_(1 - lr * weight_decay)
        m.mul_(beta1).add_(g * (1 - beta1))
        v.mul_(beta2).add_(g * g * (1 - beta2))
        m_hat = m / (1 - beta1**step)
        v_hat = max_v.copy_(torch.maximum(max_v, v)) / (1 - beta2**step)
        p.sub_(lr * m_hat / (v_hat.sqrt() + eps))


def philox_ref(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox-4x32-10 on Python's integers."""
    c0, c1, c2, c3 = counter
    for i in range(10):
        k0, k1 = ((k + i * w) % 2**32 for k, w in zip(key, (0x9E3779B9, 0xBB67AE85)))
        high_0, low_0 = divmod(c0 * 0xD2511F53, 2**32)
        high_1, low_1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
    return c0, c1, c2, c3


def _keep_ref(seed: int, first_sample: int, site: int, p: float, shape: tuple[int, ...]) -> Tensor:
    B, C = shape[0], shape[-1]
    H = shape[1] if len(shape) > 3 else 1
    R = math.prod(shape) // max(1, B * H * C)
    drawn = []
    for sample in range(first_sample, first_sample + B):
        key = seed % 2**32, seed // 2**32 ^ sample // 2**32
        for h in range(H):
            for r in range(R):
                row: list[int] = []
                for group in range(-(-C // 16)):
                    words = philox_ref((group, r, site * 2**16 + h, sample % 2**32), key)
                    row += (word // 256**i % 256 for word in words for i in range(4))
                drawn.append(row[:C])
    bytes_of_x = torch.tensor(drawn, dtype=torch.int64, device="cpu")
    return (bytes_of_x >= min(255, round(256 * p))).view(shape)


def keep_mask_ref(rng: tuple, p: float, shape: tuple[int, ...]) -> Tensor:
    """The dropout mask, one Philox call after another; a slice is cut from the full mask."""
    fields: tuple = (*rng, *(0, 0, None, (0, 0))[len(rng) - 2 :])
    key, site, first_head, first_row, rows, moved = fields
    seed, first_sample = key.tolist()
    if rows is not None:
        n = math.prod(shape[:-1])
        samples = -(-(first_row + n) // rows)
        places = [r + moved[2 * r >= rows] for r in range(rows)]
        whole = _keep_ref(seed, first_sample, site, p, (samples, max(places) + 1, shape[-1]))
        return whole[:, places].flatten(0, 1)[first_row : first_row + n].view(shape)
    if first_head or first_row:  # attention only
        size = (shape[0], first_head + shape[1], first_row + shape[2], shape[3])
        return _keep_ref(seed, first_sample, site, p, size)[:, first_head:, first_row:].contiguous()
    return _keep_ref(seed, first_sample, site, p, tuple(shape))


def dropout_ref(x: Tensor, p: float, rng: tuple | None) -> Tensor:
    """x where kept, over the probability of being kept (which is a multiple of 1/256)."""
    if p == 0:
        return x
    assert rng is not None
    scale = 256 / (256 - min(255, round(256 * p)))
    return x * keep_mask_ref(rng, p, tuple(x.shape)).to(x) * scale


def attention_ref(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, softmax_scale: float | None = None,
    dropout_p: float = 0.0, rng: tuple | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """All scores at once; queries that see no key give 0. Documents one after another."""
    if cu_seqlens is not None:
        outputs = []
        for i, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())):
            document = torch.tensor([0, i], dtype=torch.int64, device="cpu")
            mask = None if rng is None else (rng[0].cpu() + document, *rng[1:])
            parts = [x[None, start:end] for x in (q, k, v)]
            found = attention_ref(
                parts[0], parts[1], parts[2], causal=causal, softmax_scale=softmax_scale,
                dropout_p=dropout_p, rng=mask,
            )  # fmt: skip
            outputs.append(found[0])
        return torch.cat(outputs)
    T, H, D = q.shape[1:]
    Tk = k.shape[1]
    k, v = (x.repeat_interleave(H // k.shape[2], 2) for x in (k, v))
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale  # [B, H, T, Tk]
    if causal:
        seen = torch.ones(T, Tk, dtype=torch.bool, device=q.device).tril(Tk - T)
        sighted = seen.any(-1, keepdim=True)
        scores = scores.masked_fill(~seen & sighted, -math.inf)
        probs = torch.softmax(scores, -1) * sighted
    else:
        probs = torch.softmax(scores, -1)
    return torch.einsum("bhij,bjhd->bihd", dropout_ref(probs, dropout_p, rng), v)


def layer_norm_ref(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Mean and biased variance, written out."""
    centered = x - x.mean(-1, keepdim=True)
    y = centered / torch.sqrt((centered * centered).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def rms_norm_ref(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Division by the root of the mean square."""
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def residual_layer_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *,
    x_bias: Tensor | None = None, dropout_p: float = 0.0, rng: tuple | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step after another."""
    x = x if x_bias is None else (x + x_bias).to(x.dtype)
    residual_out = residual + dropout_ref(x, dropout_p, rng)
    return layer_norm_ref(residual_out, weight, bias, eps), residual_out


def residual_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, x_bias: Tensor | None = None,
    dropout_p: float = 0.0, rng: tuple | None = None, eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step after another."""
    x = x if x_bias is None else (x + x_bias).to(x.dtype)
    residual_out = residual + dropout_ref(x, dropout_p, rng)
    return rms_norm_ref(residual_out, weight, eps), residual_out


def rope_turns_ref(positions: Tensor, theta: float, dim: int) -> Tensor:
    """Cosines and sines of t * theta^(-2i / dim), fp64."""
    powers = torch.arange(dim // 2, dtype=torch.float64, device=positions.device) * 2 / dim
    angles = positions[..., None] * theta**-powers
    return torch.cat([torch.cos(angles), torch.sin(angles)], -1)


def rope_ref(
    qkv: Tensor, turns: Tensor | None, *, norm: bool = False, q_weight: Tensor | None = None,
    k_weight: Tensor | None = None, eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Head by head."""
    many, G = qkv.shape[-3:-1]

    def one(r: int, g: int, weight: Tensor | None) -> Tensor:
        x = qkv[..., r, g, :]
        x = rms_norm_ref(x, weight, eps) if norm else x
        if turns is None:
            return x
        c, s = turns.to(x.dtype).tensor_split(2, -1)
        x1, x2 = x.tensor_split(2, -1)
        return torch.cat([x1 * c - x2 * s, x1 * s + x2 * c], -1)

    q = torch.stack([one(r, g, q_weight) for g in range(G) for r in range(many - 2)], -2)
    k = torch.stack([one(many - 2, g, k_weight) for g in range(G)], -2)
    return q, k, qkv[..., many - 1, :, :]


def embedding_ref(
    idx: Tensor, wte: Tensor, wpe: Tensor | None = None, *, first_position: int = 0,
    dropout_p: float = 0.0, rng: tuple | None = None,
) -> Tensor:  # fmt: skip
    """Rows picked by advanced indexing."""
    x = wte[idx.long()]
    if wpe is not None:
        x = x + wpe[first_position : first_position + idx.shape[1]]
    return dropout_ref(x, dropout_p, rng)


def sum_shards_ref(received: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """out = sum of received's rows * scale: neighbours are added, then the sums' neighbours."""
    sums = list(received)
    while len(sums) > 1:
        pairs = [a + b for a, b in zip(sums[::2], sums[1::2])]
        sums = pairs + sums[len(pairs) * 2 :]
    out.copy_(sums[0] * scale)


def global_norm_ref(
    tensors: list[Tensor], counted: list[bool] | None = None, max_norm: float | None = None,
    loss_scale: float = 1.0, eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(norm, grad_scale, found_inf) in fp64, element by element."""
    kept = [t for i, t in enumerate(tensors) if counted is None or counted[i]]
    zero = torch.zeros(1, dtype=torch.float64, device="cpu")
    norm = torch.cat([zero, *(t.double().flatten() for t in kept)]).norm()
    finite = all(bool(t.isfinite().all()) for t in tensors)
    if not finite:
        norm = torch.cat([t.double().flatten() for t in tensors]).abs().sum()  # inf or nan
    norm = norm / loss_scale
    factor = torch.ones_like(norm)
    if max_norm is not None:
        factor = torch.clamp(max_norm / (norm + eps), max=1.0)
    found_inf = torch.tensor(float(not finite), dtype=torch.float32, device="cpu")
    return norm, factor / loss_scale, found_inf


def orthogonalize_ref(
    x: Tensor, *, coefficients: tuple[tuple[float, float, float], ...], eps: float = 1e-7
) -> Tensor:
    """U p(S) V^T of the singular value decomposition, p being the polynomials one after another."""
    wide = x.double()
    u, s, vt = torch.linalg.svd(wide / wide.norm().clamp(min=eps), full_matrices=False)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


def _random_bits_ref(seed: int, index: Tensor) -> Tensor:
    """32 random bits of (seed, step 0, stream 0) and each index, as csrc/random.h defines them."""
    key, words, mask64 = 0, (seed, 0, 0), 2**64 - 1
    for word in words:
        key = (key + word + 0x9E3779B97F4A7C15) & mask64
        key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & mask64
        key = ((key ^ key >> 27) * 0x94D049BB133111EB) & mask64
        key ^= key >> 31
    mask = 2**32 - 1

    def times(x: Tensor, factor: int) -> Tensor:  # without overflow of int64
        low = (x & 0xFFFF) * factor
        high = ((x >> 16) * factor & 0xFFFF) << 16
        return (low + high) & mask

    def mix(x: Tensor) -> Tensor:
        x = times(x ^ x >> 16, 0x7FEB352D)
        x = times(x ^ x >> 15, 0x846CA68B)
        return x ^ x >> 16

    x = mix((index & mask) ^ (key & mask))
    return mix((x + (key >> 32) + times(index >> 32, 0x9E3779B9)) & mask)


def quantize_blockwise_ref(
    x: Tensor, *, block: int = 256, seed: int | None = None, first_index: int = 0
) -> tuple[Tensor, Tensor]:
    """Codes and scales of an fp32 x, block by block."""
    largest = torch.tensor(127.0, dtype=torch.float32, device="cpu")
    codes, scales = torch.zeros(x.numel(), dtype=torch.int8, device="cpu"), []
    flat = x.flatten()
    for start in range(0, x.numel(), block):
        v = flat[start : start + block]
        top = v.abs().max()
        scale = top / largest
        if torch.isfinite(scale) and torch.isinf(scale * largest):
            scale = torch.nextafter(scale, torch.zeros((), dtype=torch.float32, device="cpu"))
        if top > 0:
            scale = scale.clamp(min=2.0**-126)
        scales.append(scale)
        if not torch.isfinite(scale):
            continue
        if scale > 0:
            scaled = (v * (1 / scale)).clamp(-largest, largest)
            if seed is None:
                code = scaled.round().to(torch.int8)
            else:
                low = scaled.abs().double().floor()
                part = ((scaled.abs().double() - low) * 2**31).floor()
                index = torch.arange(start, start + v.numel(), device="cpu") + first_index
                up = (_random_bits_ref(seed, index) >> 1) < part
                code = ((low + up) * scaled.sign()).to(torch.int8)
            codes[start : start + block] = code
    result = torch.stack(scales) if scales else x.new_empty(0)
    return codes.view(x.shape), result


def dequantize_blockwise_ref(codes: Tensor, scales: Tensor, *, block: int = 256) -> Tensor:
    """codes * scales of their blocks, in the dtype of scales."""
    each = scales.repeat_interleave(block)[: codes.numel()]
    return (codes.flatten().to(scales.dtype) * each).view(codes.shape)
