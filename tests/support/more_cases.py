"""cases_of(): the cases of kernels/cases.py, and more hostile ones that only tests need."""

from collections.abc import Iterator

from fastpar.kernels import cases
from fastpar.kernels.cases import OpCase, P

FEW_LOSSES = {
    "sum": {"reduction": "sum"},
    "both": {"label_smoothing": 1.0, "z_loss": 0.1},
    "softcap of all": {"softcap": 1.5, "label_smoothing": 0.1, "z_loss": 0.1, "reduction": "none"},
    "both, each": {"label_smoothing": 0.2, "z_loss": 1e-3, "reduction": "none"},
    "another index": {"ignore_index": 3},
}


def norms(rows: int, size: int, device: str) -> Iterator[OpCase]:
    few = min(rows, 7)
    for rms in (False, True):
        for N, C, how in ((few, 1, ""), (0, size, ""), (few, 63, "fp32 weights")):
            yield cases.norm(N, C, how, rms=rms)
        yield cases.norm(few, 63, "no weight", rms=rms)
        yield cases.residual_norm(few, 63, 0.0, device, rms=rms, how="no weight")
        yield cases.residual_norm(few, 63, 0.5, device, rms=rms, x_bias=False)
        yield cases.residual_norm(few, 64, P, device, rms=rms, how="fp32 stream")
    yield from (cases.norm(few, size, bias=False), cases.norm(few, size, "equal"))
    yield cases.norm(few, 768, "mean 1e4")


def gelus(rows: int, size: int, device: str) -> Iterator[OpCase]:
    for form in ("tanh", "erf"):
        yield cases.gelu(min(rows, 7), 1000, form, bias=False)
        yield cases.gelu(1, 1, form)
        yield cases.gelu(0, size, form)
        yield cases.gelu(min(rows, 33), 65, form, how="fp32 bias")
        yield cases.gelu(min(rows, 300), 17, form, 3.0)


def ropes(rows: int, size: int, device: str) -> Iterator[OpCase]:
    T, one = min(rows, 21), cases.rope_case
    for how in ({}, {"norm": True, "weights": "fp32"}):
        yield one(3, T, 2, 2, 16, device, documents=True, **how)
        yield one(1, 1, 1, 1, 2, device, **how)
        yield one(2, 0, 1, 2, 8, device, **how)
    yield one(2, T, 1, 2, 40, device, turned=False)
    yield one(2, T, 1, 5, 64, device, turned=False, norm=True)
    yield one(1, min(rows, 40), 4, 3, 128, device, norm=True, weights="own")


def activations(rows: int, size: int, device: str) -> Iterator[OpCase]:
    for kind in ("relu2", "swiglu"):
        yield cases.activation(min(rows, 7), 1000, kind, bias=False)
        yield cases.activation(1, 1, kind)
        yield cases.activation(0, size, kind)
        yield cases.activation(min(rows, 33), 65, kind, how="fp32 bias")
        yield cases.activation(min(rows, 300), 17, kind, 3.0)


def losses(rows: int, size: int, device: str) -> Iterator[OpCase]:
    N = min(rows, 23)
    for how, settings in FEW_LOSSES.items():
        yield cases.loss_of_logits(N, 127, 1, how, **settings)
        yield cases.loss_of_products(N, 17, 127, 1, how, max(1, N // 3), **settings)
    for N, V in ((2, 1), (1, 63)):
        yield cases.loss_of_logits(N, V)
        yield cases.loss_of_products(N, 8, V)
    yield cases.loss_of_logits(0, 20, 0, "sum", reduction="sum")


def shards_of_losses(rows: int, size: int, device: str) -> Iterator[OpCase]:
    yield from cases.shard_of_loss(min(rows, 7), 63, 40, 0.01, True)
    yield from cases.shard_of_loss(2, 1, 0, 0.01, False)
    yield from cases.shard_of_loss(0, 8, 0, 0.0, False)


def attentions(rows: int, size: int, device: str) -> Iterator[OpCase]:
    T, B = min(rows, 65), 8 if rows > 48 else 1  # enough elements for a steady largest error
    one = cases.attention_case
    for causal in (True, False):
        yield one(B, 5, 16, 2, device, Tk=T, causal=causal)  # the last queries
        yield one(B, T, 16, 2, device, Tk=33, causal=causal)  # some see no key
    for Hkv in (1, 2):
        yield one(B, 20, 24, 4, device, Hkv=Hkv)
    yield one(2 * B, 1, 8, 3, device)
    yield one(2, T, 33, 2, device, packed=True)
    yield one(1, 63, 128, 1, device, softmax_scale=0.02)
    yield one(1, 33, 16, 2, device, scale=50.0)
    if rows > 48:  # several blocks of queries and panels of keys
        yield one(1, 300, 64, 2, device)
    yield one(0, 4, 16, 2, device)
    yield one(2, 0, 16, 2, device, Tk=4)


def masked_attentions(rows: int, size: int, device: str) -> Iterator[OpCase]:
    T, one, documents = min(rows, 65), cases.attention_case, cases.attention_of_documents
    for causal in (True, False):
        yield one(1, 5, 16, 2, device, Tk=T, causal=causal, p=0.3)
        yield documents([0, 1, 41, 48, 64], 4, 16, device, Hkv=2, causal=causal, p=0.3)
    yield one(1, T, 24, 6, device, Hkv=2, p=0.3)
    yield one(1, T, 24, 2, device, p=0.3, packed=True, softmax_scale=0.3)
    yield documents([0, 30, 31, 51], 2, 24, device, p=0.3, packed=True)
    yield documents([0, 50], 6, 33, device, Hkv=1)
    yield documents(range(10), 3, 12, device)
    if rows > 48:  # several blocks of queries and panels of keys
        yield documents([0, 200, 203], 4, 16, device, Hkv=2)


def embeddings(rows: int, size: int, device: str) -> Iterator[OpCase]:
    yield cases.embedding_case(2, min(rows, 63), 127, 50, 0.0, device, first=3)
    yield cases.embedding_case(2, 7, 8, 50, 0.3, device, first=3)
    yield cases.embedding_case(3, 5, 1000, 50, 0.0, device, wpe=False)
    yield cases.embedding_case(0, 4, 4, 5, 0.0, device)
    yield cases.embedding_case(2, min(rows, 20), 1, 5, 0.0, device)


def dropouts(rows: int, size: int, device: str) -> Iterator[OpCase]:
    for shape in ((2, 3, 40), (2, 3, 4, 17), (3, 1), (0, 4, 8)):
        yield cases.dropout_case(shape, device)


def experts(rows: int, size: int, device: str) -> Iterator[OpCase]:
    yield from cases.experts_case(min(rows, 12), 40, 5, 1)
    yield from cases.experts_case(min(rows, 33), 1, 3, 3)


def flat_ops(rows: int, size: int, device: str) -> Iterator[OpCase]:
    yield from cases.flat_ops(1, 1, device)
    yield from cases.flat_ops(1, 1003, device)


def linears(rows: int, size: int, device: str) -> Iterator[OpCase]:
    for N, C, out in ((1, 1, 1), (0, 8, 4), (min(rows, 63), 64, 129)):
        yield cases.linear_case(N, C, out)
    yield cases.linear_case(min(rows, 63), size, 33, bias=False)


MORE = {  # maker of kernels/cases.py -> more of its kind
    cases.norms: norms,
    cases.gelus: gelus,
    cases.activations: activations,
    cases.ropes: ropes,
    cases.losses: losses,
    cases.shards_of_losses: shards_of_losses,
    cases.MAKERS["attention"]: attentions,
    cases.MAKERS["attention_masked"]: masked_attentions,
    cases.embeddings: embeddings,
    cases.experts: experts,
    cases.dropouts: dropouts,
    cases.flat_ops: flat_ops,
    cases.codes: lambda *_: [cases.codes_case(1, 16), cases.codes_case(701, 128)],
    cases.linears: linears,
    cases.orthogonals: lambda m, n, device: [
        cases.orthogonal_case(*shape) for shape in ((n, m), (63, 127), (100, 257))
    ],
}


def cases_of(op: str, rows: int, size: int, device: str = "cpu", **how: int) -> list[OpCase]:
    """Cases of an op, a plain one first."""
    found = cases.cases_of(op, rows, size, device, **how)
    more = MORE.get(cases.MAKERS[op], lambda *_: [])(rows, size, device)
    return [*found, *(case for case in more if case.op == found[0].op)]
