"""Single ops at GPT-2's shapes: a function for each bench, which yields its cases.

Most are cases of kernels/cases.py: the one that is timed, and the same op at fewer rows, which is
judged; stock PyTorch's own function stands beside it. Others are written out here:

attention: causal, on GPT-2's packed c_attn output, against SDPA with each backend pinned. TFLOP/s
    count half of the T x T square: 2 products forward, 5 backward (Dao 2023, arXiv 2307.08691).
    Dropout masks of different libraries differ, so only fastpar's is judged there; its rows stand
    beside the same call without dropout, which the case without dropout judges.
global_norm: fastpar also gives the clip factor and the overflow flag; "clip_grad_norm_" scales the
    gradients by it in a pass of its own, which fastpar leaves to the optimizer's step.
grouped_linear: beside F.linear expert by expert and one dense product of as many rows, which is
    what sparsity has to beat.
orthogonalize: fastpar divides by an exact norm. torch's function rounds to bf16 on every device;
    "eager" is the same products in the dtype of fastpar's.
permute: index_add of equal indices has no promised order on a GPU; "eager" is what others use.
quantize: "eager" is the same arithmetic in plain torch: rounded to nearest, or at random with
    torch's own random numbers ("seeded").
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import _muon

from bench.harness import Bench, Case, short
from bench.peers import packages, stock
from bench.report.tables import ASIDE
from fastpar import kernels
from fastpar.kernels import cases, reference
from fastpar.kernels.cases import OpCase, P
from fastpar.kernels.orthogonalize import QUINTIC

Variants = Mapping[str, Callable[..., Any]]
Shapes = list[torch.Size]
WIDE, NARROW = torch.float32, torch.bfloat16
COMPILED = "torch.compile"


def of_device(bench: Bench, on_gpu: Any, on_cpu: Any, quick: Any) -> Any:
    """What a bench runs: sizes or rows."""
    return quick if bench.quick else on_gpu if bench.device == "cuda" else on_cpu


def dtype_of(bench: Bench) -> torch.dtype:
    """Of what is timed: bf16 on a GPU, fp32 on a CPU."""
    return NARROW if bench.device == "cuda" else WIDE


def timed(
    bench: Bench, whole: OpCase, few: OpCase, others: Variants | None = None, *, name: str = "",
    dtype: torch.dtype | None = None, **how: Any,
) -> Case:  # fmt: skip
    """whole is timed, beside stock PyTorch and others; few, the same op at fewer rows, is judged.
    name: by default that of whole; how: other fields of Case."""
    dtype = dtype or dtype_of(bench)

    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Any, ...]:
        return tuple((few if small else whole).inputs(dtype, bench.device, generator).values())

    def both(forward: float, backward: float) -> dict[str, float]:
        found = {"call": forward, "forward": forward, "backward": backward}
        return found | {"forward+backward": forward + backward}

    variants = {"eager": whole.stock or whole.eager, "fastpar": whole.fn, **(others or {})}
    fields: dict[str, Any] = {"bytes_moved": both(*(n * dtype.itemsize for n in whole.elements))}
    fields["flops"] = both(*whole.flops) if any(whole.flops) else {}
    fields |= {"yardstick": few.eager if whole.stock else None, **how}
    name = name or f"{whole.op} {whole.shape}"
    return Case(name, make_inputs, variants, few.ref, dtype, **fields)


def at_rows(
    bench: Bench, make: Callable[[int], OpCase], rows: int, few: int, *others: Variants, **how: Any
) -> Case:
    """A case of so many rows, judged at `few` of them."""
    return timed(bench, make(rows), make(min(rows, few)), *others, **how)


# Products and what is beside them


def linear(bench: Bench) -> Iterator[Case]:
    N, C = of_device(bench, (16384, 768), (2048, 384), (256, 128))
    shapes = {"c_attn": (C, 3 * C), "attn.c_proj": (C, C), "c_fc": (C, 4 * C)}
    for layer, (c, out) in (shapes | {"mlp.c_proj": (4 * C, C)}).items():
        make = functools.partial(cases.linear_case, C=c, out=out)
        # A product is a library call under torch.compile too.
        yield at_rows(bench, make, N, 256, name=f"linear {layer} N={N} {c}->{out}", compiled=False)


def linear_fp8(bench: Bench) -> Iterator[Case]:
    """linear(fp8=), against F.linear; on a CPU emulated, for its numbers alone."""
    N, C = of_device(bench, (16384, 1600), (2048, 384), (256, 128))
    for layer, c, out in (("c_fc", C, 4 * C), ("mlp.c_proj", 4 * C, C)):
        make = functools.partial(cases.linear_fp8_case, C=c, out=out, scaling="row")
        name = f"linear_fp8 {layer} row N={N} {c}->{out}"
        yield at_rows(bench, make, N, 256, name=name, compiled=False)


def grouped_linear(bench: Bench) -> Iterator[Case]:
    rows, C = of_device(bench, (32768, 768), (4096, 384), (256, 128))
    E, K, dense = 8, 2, "one dense product"
    others = {dense: lambda x, weight, bias, counts: kernels.linear(x, weight[0], bias[0])}
    for layer, c, out in (("c_fc", C, 2 * C), ("c_proj", 2 * C, C)):
        make = functools.partial(cases.grouped_linear_case, C=c, out=out, E=E, K=K)
        whole, few = make(rows // K), make(min(rows, 256) // K)
        name = f"grouped_linear {layer} {whole.shape}"
        # counts are numbers of the host: nothing to compile
        how: dict[str, Any] = {"name": name, "unjudged": (dense,), "compiled": False}
        yield timed(bench, whole, few, others, **how)


def gelu(bench: Bench) -> Iterator[Case]:
    rows = of_device(bench, 16384, 2048, 64)
    for C in of_device(bench, (768, 1600, 1024, 1280), (384, 768), (384,)):
        make = functools.partial(cases.gelu, width=4 * C)
        compiled = bench.device == "cpu" or C in (768, 1600)  # they take most of a GPU run
        name = f"bias_gelu N={rows} F={4 * C}"
        yield at_rows(bench, make, rows, 512, name=name, compiled=compiled)


def activation(bench: Bench) -> Iterator[Case]:
    """At the shapes of NanoChat (relu2) and Llama (swiglu)."""
    rows = of_device(bench, 16384, 2048, 64)
    relu2, swiglu = of_device(bench, (3072, 8192), (1536, 1024), (384, 384))
    for kind, width in (("relu2", relu2), ("swiglu", swiglu)):
        make = functools.partial(cases.activation, F_=width, kind=kind, bias=False)
        yield at_rows(bench, make, rows, 512, name=f"{kind} N={rows} F={width}")


def repeated(call: Callable[[Tensor], Tensor], times: int) -> Callable[[Tensor], Tensor]:
    """What makes the call so often, and returns the last result."""
    return lambda x: [call(x) for _ in range(times)][-1]


def orthogonalize(bench: Bench) -> Iterator[Case]:
    on_cpu, theirs = [(768, 768), (768, 3072)], "torch.optim.Muon"
    wide = dtype_of(bench) == WIDE

    def eager(x: Tensor) -> Tensor:
        y = x / x.norm()
        y = y.t() if x.shape[0] > x.shape[1] else y
        for a, b, c in QUINTIC:
            gram = y @ y.t()
            y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
        return y.t() if x.shape[0] > x.shape[1] else y

    muon = functools.partial(_muon._zeropower_via_newtonschulz, ns_coefficients=QUINTIC[0],
                             ns_steps=5, eps=1e-7)  # fmt: skip
    others: dict[str, Any] = {"eager": eager, theirs: muon}
    how: dict[str, Any] = {"directions": ("call",), "compiled": False}
    how["unjudged"] = (theirs,) * wide
    shapes = of_device(bench, [*on_cpu, (1600, 6400)], on_cpu, [(64, 64), (64, 256)])
    for (m, n), many in itertools.product(shapes, (1, 12) if bench.device == "cuda" else (1,)):
        sizes = (m, n), (64, 64 * n // m)
        whole, few = (cases.orthogonal_case(a, b, QUINTIC, many=many) for a, b in sizes)
        each = {name: repeated(call, many) for name, call in others.items()}
        name = f"orthogonalize {'fp32' if wide else 'bf16'} {whole.shape}"
        yield timed(bench, whole, few, each, name=name, **how)


# Tokens and masks


def embedding(bench: Bench) -> Iterator[Case]:
    on_gpu = [(16, 1024, C, 50304) for C in (768, 1600)]
    on_cpu = [(8, 256, 384, V) for V in (50304, 4096)]
    for B, T, C, V in of_device(bench, on_gpu, on_cpu, [(2, 32, 64, 512)]):
        whole, few = (cases.embedding_case(b, T, C, V, 0.0, bench.device) for b in (B, min(B, 2)))
        yield timed(bench, whole, few)


def philox(bench: Bench) -> Iterator[Case]:
    """Counter-based dropout, against F.dropout (whose mask depends on the device's generator)."""
    B, T, C = of_device(bench, (16, 1024, 768), (8, 256, 384), (2, 32, 64))
    rng = kernels.Rng(kernels.make_key(1, 0, bench.device), 5)
    scale = 256 / (256 - kernels.quantize_p(P))

    def eager(x: Tensor) -> Tensor:
        """The same mask, applied by torch."""
        return x * kernels.keep_mask(rng, P, x.shape).to(x.dtype) * scale

    # The oracle draws its mask in Python, one Philox call after another.
    whole, few = (cases.dropout_case(s, bench.device) for s in ((B, T, C), (2, min(T, 32), C)))
    others: dict[str, Any] = {"eager": eager, "F.dropout": lambda x: F.dropout(x, P)}
    how: dict[str, Any] = {"baseline": "F.dropout", "unjudged": ("F.dropout",), "compiled": False}
    name = f"dropout p={P} B={B} T={T} C={C}"
    yield timed(bench, whole, few, others, name=name, yardstick=eager, **how)


def route(bench: Bench) -> Iterator[Case]:
    N = of_device(bench, 16384, 2048, 256)
    for E in (8, 64):
        make = functools.partial(cases.route_case, E=E, K=2)
        yield at_rows(bench, make, N, 256, dtype=WIDE)


def permute(bench: Bench) -> Iterator[Case]:
    N, C = of_device(bench, (16384, 768), (2048, 384), (256, 128))
    for case in (cases.permute_case, cases.combine_case):
        yield at_rows(bench, functools.partial(case, C=C, E=8, K=2), N, 256)


# Losses


def cross_entropy(bench: Bench) -> Iterator[Case]:
    """On stored logits of GPT-2's vocabulary."""
    ours = "fastpar in place"
    others: dict[str, Callable[..., Any]] = {  # leaves are refused; a view is none, copies nothing
        ours: lambda x, targets: kernels.cross_entropy(x.view(x.shape), targets, inplace=True)
    }
    others |= packages.liger("cross_entropy") if bench.device == "cuda" else {}
    how: dict[str, Any] = {"track_peak": True, "in_place": (ours, "liger")}
    for N, V in of_device(bench, [(16384, 50304)], [(512, 50304), (2048, 4096)], [(64, 640)]):
        make = functools.partial(cases.loss_of_logits, V=V, how="every row")
        yield at_rows(bench, make, N, 256, others, name=f"cross_entropy N={N} V={V}", **how)


def linear_cross_entropy(bench: Bench) -> Iterator[Case]:
    """At GPT-2's head, against full logits and the chunked ops of others."""
    on_gpu = [(N, C, 50304) for N in (16384, 32768) for C in (768, 1600)]
    on_cpu = [(2048, 384, 50304), (2048, 256, 4096)]
    others: dict[str, Callable[..., Any]] = {}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # torch >= 2.13
        options = torch.nn.LinearCrossEntropyOptions()  # without them it makes full logits
        others["torch chunked"] = functools.partial(F.linear_cross_entropy, options=options)
    if bench.device == "cuda":
        others |= packages.liger("fused_linear_cross_entropy")
    for N, C, V in of_device(bench, on_gpu, on_cpu, [(128, 64, 640)]):
        make = functools.partial(cases.loss_of_products, C=C, V=V, how="every row")
        how: dict[str, Any] = {"track_peak": True}
        # The forward alone is measured up to 16384 rows.
        how["directions"] = ("forward",) * (N <= 16384) + ("forward+backward",)
        name = f"linear_cross_entropy N={N} C={C} V={V}"
        yield at_rows(bench, make, N, 64, others, name=name, **how)


# Norms


def plain_norm(bench: Bench, rows: int, C: int, rms: bool, **how: Any) -> Case:
    name = "rms_norm" if rms else "layer_norm"
    others = packages.liger(name) if bench.device == "cuda" else {}
    make = functools.partial(cases.norm, C=C, rms=rms)
    return at_rows(bench, make, rows, 512, others, **how)


def residual_norm(bench: Bench, rows: int, C: int, p: float, rms: bool, **how: Any) -> Case:
    """With p: Linear's bias, dropout, residual sum and norm; else residual sum and norm."""
    make = functools.partial(cases.residual_norm, C=C, p=p, device=bench.device, rms=rms)
    make = functools.partial(make, x_bias=p > 0)
    name = f"{'bias + dropout + ' if p else ''}{make(1).op} N={rows} C={C}"
    how |= {"unjudged": (COMPILED,) if p else ()}  # its mask is another, too
    return at_rows(bench, make, rows, 192 if p else 512, name=name, **how)


def layer_norm(bench: Bench) -> Iterator[Case]:
    """layer_norm, rms_norm and what precedes them in a block, against torch's norms."""
    rows, gpu = of_device(bench, 32768, 2048, 64), bench.device == "cuda"
    widths = of_device(bench, (768, 1600, 1024, 1280), (384, 768), (128,))
    for C, rms in (*((C, False) for C in widths), (widths[0], True)):
        how: dict[str, Any] = {"directions": ("forward", "backward" if gpu else "forward+backward")}
        how |= {"compiled": C in (768, 1600)} if gpu else {}  # most of a GPU run
        if not rms:
            yield residual_norm(bench, rows, C, P, rms, **how)
        yield plain_norm(bench, rows, C, rms, **how)
        yield residual_norm(bench, rows, C, 0.0, rms, **how)


# Attention

BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION, "sdpa-math": SDPBackend.MATH,
}  # fmt: skip


def attention(bench: Bench) -> Iterator[Case]:
    shapes = [(12, 1024, 64, 0.0), (12, 1024, 64, P), (25, 1024, 64, 0.0)]
    shapes += [(768 // D, T, D, 0.0) for T in (4096, 16384) for D in (64, 128)]
    shapes += [(6, 1024, 128, 0.0), (12, 4096, 64, P), (12, 16384, 64, P), (6, 1024, 128, P)]
    on_gpu = [(16384 // T, H, T, D, p) for H, T, D, p in shapes]
    on_cpu = [(8, 6, 256, 64, 0.0), (8, 6, 256, 64, P), (2, 12, 1024, 64, 0.0)]
    on_cpu += [(2, 6, 1024, 128, 0.0), (1, 2, 4096, 64, 0.0)]
    quick = [(1, 2, 64, 64, 0.0), (1, 2, 64, 64, P)]
    for sizes in of_device(bench, on_gpu, on_cpu, quick):
        yield attention_at(bench, *sizes)


def attention_at(bench: Bench, B: int, H: int, T: int, D: int, p: float) -> Case:
    gpu = bench.device == "cuda"
    # The fp64 oracle holds T x T scores, and draws its mask one Philox call after another.
    sizes = (B, T, H), (1, min(T, 384 if p else 4096), 1 if p else 2)
    make = functools.partial(cases.attention_case, device=bench.device, p=p, packed=True)
    whole, few = (make(b, t, D, h) for b, t, h in sizes)

    def pinned(backend: SDPBackend, qkv: Tensor) -> Tensor:
        assert whole.stock is not None
        with sdpa_kernel(backend):
            return whole.stock(qkv)

    # math stores all scores: up to T = 1024
    able = ["sdpa-flash", *["sdpa-cudnn", "sdpa-efficient"] * gpu, *["sdpa-math"] * (T <= 1024)]
    others: dict[str, Any] = {n: functools.partial(pinned, BACKENDS[n]) for n in able}
    others |= packages.attentions(p) if gpu else {}
    others |= {ASIDE: kernels.attention_qkvpacked} if p else {}
    # forward+backward adds nothing to its parts, and a GPU's minutes are few.
    both = () if gpu and T > 1024 else ("forward+backward",)
    name = f"attention B={B} H={H} T={T} D={D}" + (f" dropout {p}" if p else "")
    how: dict[str, Any] = {"directions": ("forward", "backward", *both), "track_peak": True}
    how |= {"unjudged": tuple(others) if p else (), "compiled": False}  # SDPA is one kernel already
    return timed(bench, whole, few, others, name=name, **how)


# Flat memory and lists of tensors

CALL: dict[str, Any] = {"directions": ("call",)}
SMALL = [torch.Size(shape) for shape in ((37,), (5, 9), (1,), (300,))]


def drawn(shapes: Sequence[torch.Size], dtype: torch.dtype, device: str, generator: Any) -> Any:
    how: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
    return tuple(torch.randn(shape, **how) for shape in shapes)


def clip(*grads: Tensor) -> Tensor:
    norm, params = torch.nn.utils.get_total_norm(grads), []
    for g in grads:
        params.append(torch.empty_like(g))
        params[-1].grad = g
    torch.nn.utils.clip_grads_with_norm_(params, 1.0, norm)
    return norm.float()


def global_norm(bench: Bench) -> Iterator[Case]:
    gpt2 = stock.gpt2_shapes(bench.quick)
    millions = of_device(bench, (1, 124, 1500), (1, 50), (0.01,))
    for dtype, name in ((WIDE, "fp32"), (NARROW, "bf16")):
        lists = {short(n): [torch.Size([n])] for n in (int(m * 1e6) for m in millions)}
        for what, shapes in (lists | {f"GPT-2, {len(gpt2)} tensors": gpt2}).items():
            yield norm_of(f"global_norm {name} {what}", shapes, dtype, bench.device)


def norm_of(name: str, shapes: Shapes, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        return drawn([torch.Size([1001])] * 3 if small else shapes, dtype, device, generator)

    nbytes = float(sum(shape.numel() for shape in shapes) * dtype.itemsize)
    clips = "clip_grad_norm_"
    variants = {
        "eager": lambda *grads: torch.nn.utils.get_total_norm(grads).float(),
        clips: clip,
        "fastpar": lambda *grads: kernels.global_norm(grads, max_norm=1.0).norm,
    }

    def oracle(*grads: Tensor) -> Tensor:
        return reference.global_norm_ref(list(grads), max_norm=1.0)[0]

    return Case(
        name, make_inputs, variants, oracle, dtype, in_place=(clips,), **CALL,
        bytes_moved={"call": nbytes}, own_bytes={clips: 3.0 * nbytes},
        compiled=len(shapes) == 1,  # a graph of 148 norms takes a minute to compile
        # In a 16-bit type torch's norm is rounded to it.
        yardstick=lambda *grads: torch.nn.utils.get_total_norm([g.float() for g in grads]),
        unjudged=(clips, COMPILED) if dtype != WIDE else (),
    )  # fmt: skip


def sum_shards(bench: Bench) -> Iterator[Case]:
    shard = 1000 if bench.quick else 25_000_000
    for dtype in (WIDE, NARROW):
        yield shards_case(shard, dtype, bench.device)


def shards_case(numel: int, dtype: torch.dtype, device: str, world_size: int = 4) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        n = 1001 if small else numel
        received = drawn([torch.Size([world_size, n])], dtype, device, generator)
        return *received, torch.empty(n, device=device)

    def by(op: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda received, out: (op(received, out), out)[1]

    def eager(received: Tensor, out: Tensor) -> None:
        torch.sum(received, 0, dtype=WIDE, out=out)

    form = "fp32" if dtype == WIDE else "bf16"
    name = f"sum_shards of {world_size}, {form} into fp32, {short(numel)}"
    variants = {"eager": by(eager), "fastpar": by(kernels.sum_shards)}
    moved = {"call": float(numel * (world_size * dtype.itemsize + 4))}
    how: dict[str, Any] = {"bytes_moved": moved, "compiled": False, **CALL}
    return Case(name, make_inputs, variants, by(reference.sum_shards_ref), WIDE, **how)


# Blockwise codes

BLOCK = 256  # elements that share a scale


def quantize(bench: Bench) -> Iterator[Case]:
    """Codes of a gradient bucket in 8 bits, and back; back from 8-bit floats too."""
    kernels.keep_freed_memory()  # as training does: else page faults of 100 MB are what is timed
    n = 256 * (100 if bench.quick else 100_000)  # a bucket of 100 MB
    for way in ("", "seeded"):
        yield quantize_case(n, way, bench.device)
    for form in ("int8", "float8_e4m3fn"):
        yield dequantize_case(n, form, bench.device)


def by_scale(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes.view(len(scales), -1).float() * scales[:, None]).view(codes.shape)


def quantize_case(n: int, way: str, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        return tuple(drawn([torch.Size([16 * BLOCK if small else n])], WIDE, device, generator))

    def eager(x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.view(-1, BLOCK)
        scales = blocks.abs().amax(1) / 127.0
        codes = blocks / scales[:, None]
        codes = (codes + torch.rand_like(codes)).floor() if way else codes.round()
        return codes.to(torch.int8).view(x.shape), scales

    def own(x: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.quantize_blockwise(x, block=BLOCK, seed=1 if way else None)

    def check(variant: str) -> None:
        """The values of the codes are within one level of x (half a level to nearest)."""
        if not variant.startswith("fastpar"):
            return
        generator = torch.Generator(device).manual_seed(5)
        (x,) = drawn([torch.Size([64 * BLOCK])], WIDE, device, generator)
        codes, scales = own(x)
        share = 1.0 if way else 0.5
        # A tie may be off by the rounding of x / scale.
        bound = scales.repeat_interleave(BLOCK) * (share + 64 * torch.finfo(WIDE).eps)
        off = (by_scale(codes, scales) - x).abs()
        assert (off <= bound).all(), f"codes: expected errors within {share} level, got {off.max()}"

    name = f"quantize int8 {short(n)}{f', {way}' if way else ''}"
    how: dict[str, Any] = {"bytes_moved": {"call": n * (5 + 4 / BLOCK)}, "check": check, **CALL}
    return Case(name, make_inputs, {"eager": eager, "fastpar": own}, None, WIDE, **how)


def dequantize_case(n: int, form: str, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        (x,) = drawn([torch.Size([16 * BLOCK if small else n])], WIDE, device, generator)
        codes, scales = kernels.quantize_blockwise(x, block=BLOCK)
        return (x * 64).to(torch.float8_e4m3fn) if form[0] == "f" else codes, scales

    own, oracle = (
        functools.partial(op, block=BLOCK)
        for op in (kernels.dequantize_blockwise, reference.dequantize_blockwise_ref)
    )
    variants: dict[str, Any] = {"eager": by_scale, "fastpar": own}
    how: dict[str, Any] = {"bytes_moved": {"call": n * (5 + 4 / BLOCK)}, **CALL}
    return Case(f"dequantize {form} {short(n)}", make_inputs, variants, oracle, WIDE, **how)


BENCHES: dict[str, tuple[Callable[[Bench], Iterator[Case]], int, int]] = {  # seconds: CPU, GPU
    "activation": (activation, 400, 160), "attention": (attention, 600, 160),
    "sum_shards": (sum_shards, 200, 40), "cross_entropy": (cross_entropy, 300, 80),
    "embedding": (embedding, 300, 60), "gelu": (gelu, 400, 80),
    "global_norm": (global_norm, 200, 40), "grouped_linear": (grouped_linear, 400, 60),
    "layer_norm": (layer_norm, 900, 150), "linear": (linear, 400, 50),
    "linear_cross_entropy": (linear_cross_entropy, 600, 140), "linear_fp8": (linear_fp8, 200, 60),
    "orthogonalize": (orthogonalize, 200, 40), "permute": (permute, 200, 40),
    "philox": (philox, 200, 40), "quantize": (quantize, 300, 60), "route": (route, 120, 30),
}  # fmt: skip
TIME_LIMIT_S = {name: {"cpu": cpu, "cuda": gpu} for name, (_, cpu, gpu) in BENCHES.items()}


def run(bench: Bench) -> None:
    bench.run(BENCHES[bench.name][0](bench))
