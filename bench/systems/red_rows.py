"""One step on two ranks beside one process: what is wrong, refused or right, in whose hands.

    python -m bench red_rows               every program in every way: rows and their table
    python -m bench red_rows --only tied   some programs; --way FSDP2: some ways

Rows of what was run replace those of before; another version of DeepSpeed on PYTHONPATH has rows
of its own.

A program is a model, a loss and what a user does in a step; a way wraps the model as its own guide
says. With eps far above all gradients AdamW's update is a multiple of the gradient, so the error of
a step is |w - exact| / |exact - start|, exact being one process in fp64. Where numbers are drawn it
is the same way on one rank. "Wrong" begins where rounding ends: 1e-3 in fp32, 0.05 in bf16.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fastpar
from bench.peers import pipeline
from bench.peers.contenders import NAMES, PP, build, update_error
from bench.peers.stock import stock_model
from bench.records import RESULTS, machine, machine_line, parser_of, version_of
from bench.report.tables import markdown
from fastpar.comm.ranks import reason
from fastpar.kernels import make_key
from fastpar.observe import strategies
from fastpar.observe.strategies import SINGLE, Settings, import_deepspeed, whole
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.05}
EPS = 1e4
GPT2 = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=32, dropout=0.0)
Weights = dict[str, Tensor]
AVERAGED = "unequal targets, means averaged"
EXACT, TORCH, DEEPSPEED, OURS = "exact", "torch", "DeepSpeed", "fastpar"


@dataclass
class Run:
    """A model in somebody's hands: what a training loop calls, and its weights whole."""

    module: Any
    backward: Callable[[Tensor], Any]
    step: Callable[[], Any]
    weights: Callable[[], Weights]


@dataclass(frozen=True)
class Way:
    """kind: whose; wrap(way, model, micro-batches) -> a Run; stage: of ZeRO."""

    name: str
    kind: str
    wrap: Callable[["Way", nn.Module, int], Run]
    stage: int = 0
    dtype: torch.dtype = torch.float32

    def run(self, model: nn.Module, accumulate: int = 1) -> Run:
        return self.wrap(self, self.cast(model), accumulate)

    def cast(self, x: Any) -> Any:
        """In the program's format; exact: its values as fp64."""
        return x.to(self.dtype).double() if self.kind == EXACT else x.to(self.dtype)

    @property
    def gain(self) -> float:
        """Of the rate: an update is far above what weights round away."""
        return 1e3 if self.dtype == torch.bfloat16 else 1.0

    @property
    def shown(self) -> str:
        """In rows."""
        mark = f"{DEEPSPEED} {version_of('deepspeed') or 'missing'}"
        return f"torch {self.name}" if self.kind == TORCH else self.name.replace(DEEPSPEED, mark)


def _named(weights: Iterable[tuple[str, Tensor]]) -> Weights:
    return {name: whole(w).detach().double().clone() for name, w in weights}


def strategy(way: Way, model: nn.Module, accumulate: int) -> Run:
    """As `fastpar compare` wraps it; exact: one process."""
    name = NAMES.get(way.name, SINGLE)
    settings = Settings(lr=EPS * way.gain, eps=EPS, weight_decay=0.0)
    made = strategies.build(name, lambda: model, settings)

    def backward(loss: Tensor) -> None:
        made._backward(loss, accumulate)

    return Run(made.model, backward, made._update, lambda: _named(made.weights()))


def deepspeed(way: Way, model: nn.Module, accumulate: int) -> Run:
    package = import_deepspeed("cpu")
    package.init_distributed(dist_backend="gloo", verbose=False)
    config: Any = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulate}
    config |= {"zero_optimization": {"stage": way.stage}, "gradient_clipping": 0.0}
    config |= {"bf16": {"enabled": way.dtype == torch.bfloat16}, "steps_per_print": 10**9}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    lr = EPS * way.gain
    opt = torch.optim.AdamW(model.parameters(), lr=lr, eps=EPS, weight_decay=0.0)
    engine, *_ = package.initialize(model=model, optimizer=opt, config=config)

    def backward(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()  # its guide: after every micro-batch

    def weights() -> Weights:
        some = list(engine.module.parameters())
        with package.zero.GatheredParameters(some, enabled=way.stage == 3):
            return _named(engine.module.named_parameters())

    return Run(engine, backward, lambda: None, weights)


WAYS = (
    Way("DDP", TORCH, strategy),
    Way("FSDP2", TORCH, strategy),
    *(Way(f"DeepSpeed ZeRO-{stage}", DEEPSPEED, deepspeed, stage) for stage in (1, 2, 3)),
    *(Way(f"fastpar ZeRO-{stage}", OURS, strategy, stage) for stage in (0, 2, 3)),
)


def _mine(x: Tensor) -> Tensor:
    """This rank's rows."""
    return x.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else x


def _tokens() -> tuple[Tensor, Tensor]:
    idx = torch.randint(32, (8, 9))
    return idx[:, :-1].clone(), idx[:, 1:].clone()


# The programs: one step of a model on this rank's rows.


class Twice(nn.Module):
    """A layer that is used twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(16, 16)])
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.h[0](F.gelu(self.h[0](x)))).square().mean()


class Tied(nn.Module):
    """A table that is embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, 16)
        self.h = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        logits = F.linear(F.gelu(self.h[0](self.wte(x))), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction=reduction)


def step(
    make: Callable[[], nn.Module], inputs: Callable[[], Any], pieces: int, way: Way
) -> Weights:
    """So many micro-batches of this rank's rows."""
    run = way.run(make(), pieces)
    parts = [_mine(way.cast(x) if x.is_floating_point() else x).chunk(pieces) for x in inputs()]
    for part in zip(*parts):
        run.backward(run.module(*part))
    run.step()
    return run.weights()


def _floats() -> tuple[Tensor]:
    return (torch.randn(8, 16),)


def _some_targets() -> tuple[Tensor, Tensor]:
    """Rows of 1 to 8 targets; -100 is none."""
    x, y = _tokens()
    none = torch.arange(8)[None, :] > torch.arange(8)[:, None]
    return x, y.masked_fill(none, -100)


def averaged(way: Way) -> Weights:
    """The mean of each micro-batch, averaged over micro-batches and ranks, as loops usually do."""
    return counted(way) if way.kind == EXACT else step(Tied, _some_targets, 2, way)


def counted(way: Way) -> Weights:
    """The mean over all targets of the step: fastpar counts them, elsewhere the loop does."""
    run = way.run(Tied(), 1 if way.kind in (OURS, EXACT) else 2)
    x, y = _some_targets()
    scale = 1.0
    if way.kind == OURS:
        fastpar.engine_of(run.module).count_tokens(int((_mine(y) >= 0).sum()))
    elif way.kind == EXACT:
        scale = 1.0 / int((y >= 0).sum())
    else:
        total = (_mine(y) >= 0).sum()
        dist.all_reduce(total)
        scale = 2 * dist.get_world_size() / int(total)  # undoes both means
    for part, target in zip(_mine(x).chunk(2), _mine(y).chunk(2)):
        run.backward(run.module(part, target, reduction="sum") * scale)
    run.step()
    return run.weights()


def dropped(way: Way) -> Weights:
    """Dropout in two micro-batches: both on one rank, or one on each of two."""
    parts = 2 // dist.get_world_size()
    config = GPTConfig(**{**vars(GPT2), "dropout": 0.2})
    start = fastpar.GPT(config, seed=0)
    model = start if way.kind == OURS else stock_model(config)
    run = way.run(model, parts)
    torch.manual_seed(1 + dist.get_rank())
    x, y = _tokens_of(0)
    for i, (part, target) in enumerate(zip(_mine(x).chunk(parts), _mine(y).chunk(parts))):
        first = (dist.get_rank() * parts + i) * len(part)
        key = {"rng_key": make_key(7, first)} if way.kind == OURS else {}
        run.backward(run.module(part, target, **key))
    run.step()
    return run.weights()


def _tokens_of(seed: int) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _tokens()


@dataclass(frozen=True)
class Program:
    """thread: where it was reported. alone: what is exact is the way itself on one rank."""

    name: str
    what: Callable[[Way], Weights]
    dtype: torch.dtype = torch.float32
    thread: str = ""
    alone: bool = False
    ways: tuple[Way, ...] = field(default=WAYS)


TWICE, FOUR_TIMES = (partial(step, Twice, _floats, pieces) for pieces in (1, 4))
PROGRAMS = (
    Program("a layer used twice, bf16", TWICE, torch.bfloat16, "DeepSpeed 8224"),
    Program("a layer used twice", TWICE),
    Program("four micro-batches", FOUR_TIMES, thread="DeepSpeed 7718"),
    Program("four micro-batches, bf16", FOUR_TIMES, torch.bfloat16, "DeepSpeed 7718"),
    Program("a tied table", partial(step, Tied, _tokens, 1)),
    Program(AVERAGED, averaged, thread="torchtitan 2972"),
    Program("unequal targets, counted", counted, thread="torchtitan 2972"),
    Program("dropout on one rank and on two", dropped, thread="pytorch 168058", alone=True),
)


def _rank(what: Callable[[Any], Any], way: Any) -> Any:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    return what(way)


def on(ranks: int, what: Callable[[Any], Any], way: Any) -> Any:
    return run_ranks(_rank, ranks, what, way, backend="gloo", timeout_s=180.0)[0]


def _exact(program: Program) -> tuple[Weights, Weights]:
    """Weights before the step and after it, of one process in fp64."""
    start: Weights = {}

    def wrap(way: Way, model: nn.Module, accumulate: int) -> Run:
        start.update(_named(model.named_parameters()))
        return strategy(way, model, accumulate)

    torch.manual_seed(0)
    return start, program.what(Way(EXACT, EXACT, wrap, dtype=program.dtype))


def error_of(program: Program, way: Way) -> float:
    """Of the step on two ranks; raises what the way raises."""
    way = replace(way, dtype=program.dtype)
    found = on(2, program.what, way)
    if program.alone:
        exact = on(1, program.what, way)
        start = _named(fastpar.GPT(GPT2, seed=0).named_parameters())
    else:
        start, exact = _exact(program)
    start = {name: start[name][: len(exact[name])] for name in exact}
    return update_error(iter(found.items()), exact, start)


# Programs of layouts that have ways of their own: (way, figure).


def clipped(rank_way: str) -> float:
    """The norm that clipping sees where two ranks split the layers, relative to one process's."""
    config = GPTConfig(**{**vars(GPT2), "n_embd": 32})
    x, y = _tokens_of(0)
    exact = stock_model(config).double()
    exact(x, y).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in exact.parameters() if p.grad is not None])
    if rank_way == OURS:
        net = fastpar.parallelize(fastpar.GPT(config, seed=0), fastpar.Mesh(tp=2, device="cpu"))
        opt = fastpar.AdamW(net.parameters(), lr=0.0, max_grad_norm=1e-2)
        net(x, y).backward()
        opt.step()
        found: Any = opt.grad_norm
    else:
        from torch.distributed.tensor.parallel import loss_parallel

        made = build("torch DTensor", config)
        with loss_parallel():
            made.model(x, y).backward()
        found = torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1e-2)
    return float(abs(whole(found) - norm) / norm)


def tied_stages(rank_way: str) -> float:
    """How far the two stages' copies of a tied table are apart after a step, over what it moved."""
    x, y = _tokens_of(0)
    settings = Settings(lr=EPS, eps=EPS, weight_decay=0.0, parallel=Parallel(grad_accum_steps=8))
    titles = {TORCH: pipeline.TORCH, DEEPSPEED: pipeline.DEEPSPEED, OURS: PP}
    made: Any = build(titles[rank_way], GPT2, settings)
    if rank_way == TORCH:  # without the sum by hand that bench/peers/pipeline.py adds
        first = made.model.first
        made.schedule.step(x) if first else made.schedule.step(target=y, losses=[])
        made.optimizer.step()
        table = made.model.wte.weight
    else:
        made.step(x, y)
        named = made.model.module if rank_way == DEEPSPEED else made.model
        table = next(p for n, p in named.named_parameters() if "wte" in n or "table" in n)
    copies = [torch.empty_like(table) for _ in range(2)]
    dist.all_gather(copies, table.detach().contiguous())
    start = fastpar.GPT(GPT2, seed=0).wte.weight[: len(table)]
    return float((copies[0] - copies[1]).norm() / (copies[1] - start).norm())


SPLIT = {"torch DTensor": TORCH, "fastpar tp=2": OURS}
STAGES = {"torch Schedule1F1B, as it is": TORCH, "DeepSpeed TiedLayerSpec": DEEPSPEED}
STAGES |= {"fastpar pp=2": OURS}
LAYOUTS: tuple[tuple[str, Callable[[str], float], str, dict[str, str]], ...] = (
    ("clipping where ranks split layers", clipped, "", SPLIT),
    ("a tied table on two pipeline stages", tied_stages, "torchtitan 1524", STAGES),
)


def trials() -> Iterator[tuple[str, str, str, float, Callable[[], float]]]:
    """Program, thread, way, the bound of what is right, and what measures the error."""
    for program in PROGRAMS:
        for way in program.ways:
            measure = partial(error_of, program, way)
            yield program.name, program.thread, way.shown, ROUNDING[program.dtype], measure
    for name, what, thread, ways in LAYOUTS:
        for title, kind in ways.items():
            title = title.replace(DEEPSPEED, f"{DEEPSPEED} {version_of('deepspeed') or 'missing'}")
            yield name, thread, title, ROUNDING[torch.float32], partial(on, 2, what, kind)


def rows(only: str = "", ways: str = "") -> list[dict[str, Any]]:
    """A row for each program and way."""
    found = []
    for program, thread, way, bound, measure in trials():
        if only not in program or ways not in way:
            continue
        row: dict[str, Any] = {"program": program, "thread": thread, "way": way}
        try:
            row["error"] = measure()
            row["verdict"] = "right" if row["error"] < bound else "wrong"
        except Exception as error:
            row |= {"verdict": "refused", "why": reason(error)}
        figure = row.get("error", row.get("why"))
        print(f"{program:36} {way:30} {row['verdict']:8} {figure}", flush=True)
        found.append(row)
    return found


def table(found: dict[str, Any]) -> str:
    about = """# One step on two ranks: wrong, refused or right

Written by `python -m bench red_rows`, which has the programs. The error is that of the
step's update against one process in fp64 (dropout: against one rank; clipping: of the
norm; stages: between both copies of a table). An average of means over unequal targets
is wrong in every package, also in fastpar; its `count_tokens` corrects that, elsewhere
the loop has to.
"""
    cells = []
    for row in found["rows"]:
        figure = f"{row['error']:.1e}" if "error" in row else row["why"]
        verdict = row["verdict"] if row["verdict"] == "right" else f"**{row['verdict']}**"
        cells.append([row["program"], row["way"], verdict, figure, row["thread"]])
    head = ["program", "way", "verdict", "error", "reported in"]
    return f"{about}\n{markdown(head, cells)}\n\n{machine_line(found['machine'])}.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status: 1 if a way of fastpar is not right."""
    parser = parser_of("bench red_rows", __doc__)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--way", default="", help="ways whose name contains this")
    parser.add_argument("--into", type=Path, default=RESULTS / "red_rows")
    args = parser.parse_args(argv)
    new = rows(args.only, args.way)
    file = args.into / "rows.json"
    old = json.loads(file.read_text())["rows"] if file.exists() else []
    merged = {(row["program"], row["way"]): row for row in [*old, *new]}
    names = [program for program, *_ in trials()]
    in_order = sorted(merged.values(), key=lambda row: names.index(row["program"]))
    found = {"machine": machine("cpu"), "rows": in_order}
    args.into.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    (args.into / "README.md").write_text(table(found))
    own = [row for row in new if row["way"].startswith("fastpar")]
    return int(any(row["verdict"] != "right" and row["program"] != AVERAGED for row in own))


if __name__ == "__main__":
    sys.exit(main())
