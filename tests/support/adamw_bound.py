"""How far steps of AdamW in fp32 can be from exact ones, from the roundings that they make."""

import torch

U = 2.0**-24  # unit roundoff of fp32


class Bound:
    """Running error analysis: how far any fp32 evaluation of the rule can be from an exact run.

    The order of operations is csrc/adamw_math.h's, torch's own; others with as many roundings have
    the same bound. To first order in U, per element and step, with e_x the distance of x:

    g' = g * scale: e_g = r * U * |g'|, with r roundings: one of the product, and those of the scale
    m' = m + (1 - b1) * (g - m): the difference, the constant and the product round once each, the
        sum once: e_m' = b1 * e_m + (1 - b1) * e_g + U * (3 * (1 - b1) * |g - m| + |m'|)
    v' = b2 * v + (1 - b2) * g * g: constant and product, constant and two products, sum:
        e_v' = b2 * e_v + (1 - b2) * 2 * |g| * e_g + U * (2 * b2 * v + 3 * (1 - b2) * g^2 + v')
    u = v' or the largest so far (a maximum adds no error): e_u = max(e_u, e_v')
    d = sqrt(u) / s + eps: e_d = e_u / (2 * sqrt(u) * s) + 4 * U * d
    q = a * m / d: e_q = a * (e_m / d + |m| * e_d / d^2) + 3 * U * |q|
    p' = p * (1 - lr * w) - q: e_p' = e_p + U * (2 * |p| + |p'|) + e_q
    Below the normal numbers a rounding is absolute: TINY in each of m and v. Terms of second order
    are covered by 1 percent.
    """

    TINY = 2.0**-140

    def __init__(self, n):
        self.p = self.m = self.v = self.u = torch.zeros(n, dtype=torch.float64)

    def step(
        self, g, roundings, p0, m0, v0, p1, m1, v1, u1, *, lr, beta1, beta2, eps, weight_decay, step
    ):
        e_g = roundings * U * g.abs()
        part = 1 - beta1
        self.m = (
            beta1 * self.m + part * e_g + U * (3 * part * (g - m0).abs() + m1.abs()) + self.TINY
        )
        part = 1 - beta2
        self.v = beta2 * self.v + 2 * part * g.abs() * e_g + self.TINY
        self.v = self.v + U * (2 * beta2 * v0 + 3 * part * g**2 + v1)
        self.u = torch.maximum(self.u, self.v)
        s, a = (1 - beta2**step) ** 0.5, lr / (1 - beta1**step)
        d = u1.sqrt() / s + eps
        e_root = torch.minimum(self.u / (2 * u1.sqrt()), self.u.sqrt())
        e_d = e_root / s + 4 * U * d
        e_q = a * (self.m / d + m1.abs() * e_d / d**2) + 3 * U * (a * m1 / d).abs()
        self.p = self.p + U * (2 * p0.abs() + p1.abs()) + e_q + self.TINY

    def holds(self, p, m, v, exact, times=1.01):
        for name, x, e in (("p", p, self.p), ("m", m, self.m), ("v", v, self.v)):
            assert ((x.double() - exact[name]).abs() <= times * e).all(), name


class ExactAdamW(torch.optim.AdamW):
    """torch's, for a model in fp64, with the bound for each parameter in `bounds`.

    `roundings` is those of each gradient before the step: see Bound.
    """

    roundings = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bounds = {}

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        before = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    zero = torch.zeros_like(p)
                    old = [self.state[p].get(k, zero).clone() for k in ("exp_avg", "exp_avg_sq")]
                    before.append((group, p, p.clone(), *old))
        super().step()
        for group, p, *old in before:
            state = self.state[p]
            most = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
            bound = self.bounds.setdefault(p, Bound(p.shape))
            if not group["amsgrad"]:
                bound.u = torch.zeros_like(p)
            bound.step(
                -p.grad if group["maximize"] else p.grad,
                self.roundings,
                *old,
                p,
                state["exp_avg"],
                state["exp_avg_sq"],
                most,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=int(state["step"]),
            )

    def holds(self, *models, times=1.01):
        """Asserts it for the parameters of models in fp32."""
        ours = [p for group in self.param_groups for p in group["params"]]
        for model in models:
            for p, want in zip(model, ours, strict=True):
                error = (p.detach().double() - want).abs()
                bound = self.bounds[want].p if want in self.bounds else 0.0
                assert (error <= times * bound).all()
