"""The two linear layers of an MLP with bias + GELU (tanh form) between them.

    u = x @ weight1.T + bias1,  h = gelu(u),  y = h @ weight2.T + bias2
    du = (dy @ weight2) * gelu'(u),  dbias1 = sum of du over the rows,  dx = du @ weight1,
    dweight1 = du.T @ x,  dweight2 = dy.T @ h,  dbias2 = sum of dy over the rows

On CUDA, in 16 bits, four of these come out of cublasLt's products by their epilogues (linear.py): h
and u of the first, du and dbias1 of the product with weight2, dbias2 of the one that gives
dweight2. So no pass over [N, F] is left between the products. This runs where a proof on first use
found it right and faster; otherwise, on CPU and under torch.use_deterministic_algorithms, the op is
linear, bias_gelu and linear. A product that cublasLt refuses later is computed by torch.
Saved for backward: x, h, u and the weights, as many bytes as these three keep.
torch's own _addmm_activation has the first product's epilogue without u, so it serves no backward.
Source: Hendrycks, Gimpel 2016, arXiv 1606.08415.
"""

from torch import Tensor

from fastpar.kernels.gelu import bias_gelu
from fastpar.kernels.linear import (
    BGRADB,
    DGELU_BGRAD,
    GELU_AUX_BIAS,
    linear,
    matmul,
    matmul_lt,
    use_epilogues,
)
from fastpar.kernels.op import define_autograd, define_op, refuse_double_backward
from fastpar.kernels.weight_gradients import queue_for


def gelu_mlp_fwd(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """y [..., G], h and u [N, F]."""
    rows = x.reshape(-1, x.shape[-1])
    u = x.new_empty(rows.shape[0], weight1.shape[0])
    h = matmul_lt(rows, weight1.t(), GELU_AUX_BIAS, bias1, u)
    y = matmul(h, weight2.t(), bias=bias2)
    return y.view(*x.shape[:-1], weight2.shape[0]), h, u


def _weight2_bwd(rows: Tensor, h: Tensor, dbias2: Tensor) -> Tensor:
    """dweight2; fills dbias2, unless it is [0]."""
    return matmul_lt(rows.t(), h, BGRADB, dbias2) if len(dbias2) else matmul(rows.t(), h)


def _hidden_bwd(rows: Tensor, weight2: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """du and dbias1."""
    dbias1 = u.new_empty(u.shape[1])
    return matmul_lt(rows, weight2, DGELU_BGRAD, dbias1, u), dbias1


def gelu_mlp_bwd(
    dy: Tensor, x: Tensor, weight1: Tensor, weight2: Tensor, h: Tensor, u: Tensor, need: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dweight1, dbias1, dweight2, dbias2; [0] for what is not needed."""
    need_dx, need_dweight1, _, need_dweight2, need_dbias2 = need
    rows = dy.reshape(-1, dy.shape[-1]).contiguous()
    dx, dweight1, dweight2 = (x.new_empty(0) for _ in range(3))
    dbias2 = x.new_empty(weight2.shape[0] if need_dbias2 else 0)
    if need_dweight2 or need_dbias2:
        dweight2 = _weight2_bwd(rows, h, dbias2)
    du, dbias1 = _hidden_bwd(rows, weight2, u)
    if need_dweight1:
        dweight1 = matmul(du.t(), x.reshape(-1, x.shape[-1]))
    if need_dx:
        dx = matmul(du, weight1).view(x.shape)
    return dx, dweight1, dbias1, dweight2, dbias2


def _fake(x, weight1, bias1, weight2, bias2):
    rows = x.numel() // x.shape[-1]
    h, u = (x.new_empty(rows, weight1.shape[0]) for _ in range(2))
    return x.new_empty(*x.shape[:-1], weight2.shape[0]), h, u


def _bwd_fake(dy, x, weight1, weight2, h, u, need):
    need_dx, need_dweight1, _, need_dweight2, need_dbias2 = need
    return (
        x.new_empty(x.shape if need_dx else (0,)),
        x.new_empty(weight1.shape if need_dweight1 else (0,)),
        x.new_empty(weight1.shape[0]),
        x.new_empty(weight2.shape if need_dweight2 or need_dbias2 else (0,)),
        x.new_empty(weight2.shape[0] if need_dbias2 else 0),
    )


_gelu_mlp = define_op(
    "gelu_mlp(Tensor x, Tensor weight1, Tensor bias1, Tensor weight2, Tensor? bias2) "
    "-> (Tensor, Tensor, Tensor)",
    gelu_mlp_fwd,
    _fake,
    ("CPU", "CUDA"),
)
_gelu_mlp_bwd = define_op(
    "gelu_mlp_bwd(Tensor dy, Tensor x, Tensor weight1, Tensor weight2, Tensor h, Tensor u, "
    "bool[] need) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    gelu_mlp_bwd,
    _bwd_fake,
    ("CPU", "CUDA"),
)


def _setup_context(ctx, inputs, output):
    x, weight1, _bias1, weight2, bias2 = inputs
    ctx.queue, ctx.later = queue_for(weight1), (weight1, weight2, bias2)
    ctx.save_for_backward(x, weight1, weight2, *output[1:])


def _weights_later(ctx, dy, need):
    """The weights' gradients, and that of bias2, which comes with one of them, wait."""
    queue, (weight1, weight2, bias2) = ctx.queue, ctx.later
    x, _, _, h, u = ctx.saved_tensors
    rows = dy.reshape(-1, dy.shape[-1]).contiguous()
    du, dbias1 = _hidden_bwd(rows, weight2, u)
    dbias2 = x.new_empty(weight2.shape[0] if need[4] else 0)
    queue.later(weight2, lambda _: _weight2_bwd(rows, h, dbias2))
    if need[4]:
        queue.later(bias2, lambda _: dbias2)
    queue.later(weight1, lambda out: matmul(du.t(), x.reshape(-1, x.shape[-1]), out=out))
    return matmul(du, weight1).view(x.shape) if need[0] else None, None, dbias1, None, None


def _backward(ctx, dy, *_):
    refuse_double_backward("gelu_mlp")
    need = list(ctx.needs_input_grad)
    if ctx.queue is not None:
        return _weights_later(ctx, dy, need)
    grads = _gelu_mlp_bwd(dy, *ctx.saved_tensors, need)
    return tuple(grad if needed else None for grad, needed in zip(grads, need))


define_autograd(_gelu_mlp, _setup_context, _backward, by_products=2)


def gelu_mlp(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None = None,
) -> Tensor:
    """gelu(x @ weight1.T + bias1) @ weight2.T + bias2, GELU in its tanh form.

    Args:
        x: [..., C], any dtype that linear takes.
        weight1: [F, C]; weight2: [G, F]; dtype of x.
        bias1, bias2: [F] and [G], dtype of x, or None.
    Returns:
        y: [..., G]. x, the weights and two tensors [..., F] are kept for backward.
    Raises:
        ValueError: shapes that do not fit.
        RuntimeError: a second derivative is asked for.
    Traffic: that of the two products; by the epilogues nothing beside them but u, once each way.
    Deterministic: yes, bitwise.
    Oracle: fastpar.kernels.reference.gelu_mlp_ref
    """
    fits = x.shape[-1:] == weight1.shape[1:] and weight1.shape[:1] == weight2.shape[1:]
    for bias, weight in ((bias1, weight1), (bias2, weight2)):
        fits = fits and (bias is None or bias.shape == weight.shape[:1])
    if fits and bias1 is not None and use_epilogues("gelu_mlp", x, weight1, bias1, weight2, bias2):
        y: Tensor = _gelu_mlp(x, weight1, bias1, weight2, bias2)[0]
        return y
    return linear(bias_gelu(linear(x, weight1), bias1), weight2, bias2)
