"""`fastpar plan --model FOLDER`: which layouts of another library's model fit, and their peak.

FOLDER has the config.json of a Hugging Face model. The model is made on the meta device, without
memory or weights, and its parts run there once: each kind of block, and what is before and behind
them. What they keep and need goes through the fold of memory.py, with the buckets that
parallelize() would make.

[Note: tp by plan] Weights are split as transformers' own plan of the model says (colwise, rowwise),
or fastpar's for GPT-2 (foreign/tp_plan.py); everything between layers is whole on every rank.

[Note: two runs] All sizes are linear in the sequences of a micro-batch: they are measured with one
and with two.

Not predicted: buffers that an attention kernel other than scaled_dot_product_attention would keep,
and experts whose code does not run without values.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from fastpar.axes import layout_text, size_text
from fastpar.axes.data import GPTBuckets
from fastpar.axes.pipeline import RankParts
from fastpar.axes.pipeline.schedules import Held
from fastpar.axes.step import Setup
from fastpar.engine.gathers import find_units, unit_of_parameters
from fastpar.files.tensor_file import DTYPES
from fastpar.foreign.tp_plan import GPT2, Column, Divide, Head, Row, Vocab
from fastpar.predict.memory import Block, Memory, Step, Table, peak_of, states_of
from fastpar.settings.files import option
from fastpar.settings.mesh import divisors
from fastpar.settings.parallel import Parallel
from fastpar.sharding.layout import ParamSpec, build_layout

LONGEST = 4096  # tokens of a sequence, if the model allows more and nothing is asked
TOKENS = 524288  # of a step, if nothing is asked
OF_GPTS = (  # options that only models of `fastpar train` have
    *("n_layer", "n_head", "n_embd", "vocab_size", "n_expert", "expert_top_k", "expert_hidden"),
    *("pp", "tp_grid", "optimizer", "fp8", "measure"),
)
_replaced = functools.partial(mock.patch.object, create=True)
_STYLES = {  # of transformers
    **{"colwise": Column(), "rowwise": Row(), "embedding_rowwise": Vocab()},
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), Head()),
}


class SplitError(ValueError):
    """A tp over which the planner cannot split a model; the message says why."""


def is_folder(model: str) -> bool:
    """Whether this names a folder with a model's configuration."""
    return Path(model, "config.json").is_file()


class _Live(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still there: now, and most.

    Args:
        module, inputs: whose tensors do not count.
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        super().__init__()
        self._weak: dict[int, Any] = {}
        before = [*module.parameters(), *module.buffers(), *tree_iter(inputs)]
        self._before = {x.untyped_storage()._cdata for x in before if isinstance(x, Tensor)}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self._weak.keys() | self._before:
                    self._weak[storage._cdata] = storage._weak_ref()
        self.now()
        return out

    def now(self) -> int:
        total = 0
        for key, weak in [*self._weak.items()]:
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            if storage is None:
                torch.UntypedStorage._free_weak_ref(weak)
                del self._weak[key]
            else:
                total += storage.nbytes()
        self.most = max(self.most, total)
        return total

    def taken(self) -> int:
        """The most since the last call."""
        self.now()
        most, self.most = self.most, 0
        return most


class _Attention(torch.autograd.Function):
    """What a fused attention keeps: its inputs, its output, and a number per row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *map(torch.empty_like, ctx.saved_tensors[:3]), None


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **how: Any) -> Any:
    return _Attention.apply(query, key, value, attn_mask)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parts for a micro-batch.

    Attributes:
        length: tokens of a sequence.
        kept, needs: for each kind of block: from forward to backward; gradients and buffers of its
            backward.
        own: of the features between blocks. before: of what is made before the blocks, with them.
        loss: of the head, its loss and their backward.
    """

    length: int
    kept: tuple[float, ...]
    needs: tuple[float, ...]
    own: float
    before: float
    loss: float

    def at(self, twice: Sizes, n: int) -> Sizes:
        """For n sequences, from those of one (self) and of two; see [Note: two runs]."""

        def line(one: Any, two: Any) -> Any:
            if isinstance(one, tuple):
                return tuple(map(line, one, two))
            return max(0.0, one + (n - 1) * (two - one))

        both = zip([*vars(self).values()][1:], [*vars(twice).values()][1:])
        return Sizes(self.length, *(line(*sizes) for sizes in both))


class FolderModel:
    """A model on the meta device, split over tp.

    Raises:
        SplitError: see there.
    Attributes:
        blocks: its repeated modules; kinds: the kind of each, by class and shapes.
    """

    def __init__(self, model: Any, tp: int = 1) -> None:
        self.model = copy.deepcopy(model)
        self._buckets: dict[tuple[Any, ...], GPTBuckets] = {}
        if tp > 1:
            _split_all(self.model, tp)
        self.model.tie_weights()
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        for p in self.params:  # the fold counts gradients
            p.register_post_accumulate_grad_hook(_drop)
        units = find_units(self.model, None, merge_bytes=0.0)[1:]
        self.blocks = [module for unit in units for module in unit]
        looks = [
            (type(m), tuple((n, p.shape) for n, p in m.named_parameters())) for m in self.blocks
        ]
        self._looks = list(dict.fromkeys(looks))
        self.kinds = tuple(self._looks.index(look) for look in looks)

    def sizes(self, batch: int, length: int) -> Sizes:
        """Runs each kind of block, and the rest without blocks.

        Raises:
            RuntimeError: code that needs values.
        """
        calls: dict[int, tuple[Any, ...]] = {}
        ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
        firsts = [self.kinds.index(kind) for kind in range(len(self._looks))]

        def note(index: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                calls[index] = args, kwargs, output

            return hook

        hooks = [self.blocks[i].register_forward_hook(note(i), with_kwargs=True) for i in firsts]
        # Whether rows are packed is a question of values; here they are not.
        masks = sys.modules.get("transformers.masking_utils", F)
        packed = _replaced(masks, "find_packed_sequence_indices", lambda *args, **how: None)
        with _replaced(F, "scaled_dot_product_attention", _attention), packed:
            with torch.no_grad():
                self._loss(ids)
            for hook in hooks:
                hook.remove()
            measured = [_run_block(self.blocks[i], *calls[i][:2]) for i in firsts]
            rest = self._run_rest(ids, calls)
        kept, needs = zip(*measured)
        return Sizes(length, kept, needs, *rest)

    def _loss(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def _run_rest(self, ids: Tensor, calls: dict[int, tuple[Any, ...]]) -> list[float]:
        """(own, before, loss) of Sizes, with blocks that do nothing."""
        seen: dict[str, float] = {}
        live = _Live(self.model, ids)

        def passing(i: int) -> Callable[..., Any]:
            like = calls[self.kinds.index(self.kinds[i])][2]

            def forward(*args: Any, **kwargs: Any) -> Any:
                x = _first(args, kwargs)
                if i == 0:
                    seen["own"], seen["before"] = x.nbytes, live.now()
                if i == len(self.blocks) - 1:
                    x = x.view_as(x)
                    x.register_hook(lambda grad: seen.update(loss=live.taken()))
                    live.taken()
                return x if isinstance(like, Tensor) else (x, *like[1:])

            return forward

        with contextlib.ExitStack() as stack:
            for i, block in enumerate(self.blocks):
                stack.enter_context(_replaced(block, "forward", passing(i)))
            stack.enter_context(live)
            self._loss(ids).backward()
        return [seen["own"], seen["before"], max(0.0, seen["loss"] - seen["before"])]

    def buckets(self, setup: Setup) -> GPTBuckets:
        """Those that parallelize() would make."""
        key = setup.stage > 0, setup.bucket_bytes, setup.grad_dtype
        if key not in self._buckets:
            self._buckets[key] = self._make_buckets(setup)
        return self._buckets[key]

    def _make_buckets(self, setup: Setup) -> GPTBuckets:
        merge, by_unit = Parallel.first_bucket_mb * 2**20, setup.stage > 0
        unit_of = unit_of_parameters(find_units(self.model, None, merge_bytes=merge))
        inside = {p: name for m in self.blocks for name, p in m.named_parameters()}
        params, units = self.params, [unit_of[p] for p in self.params]
        layout = build_layout(
            [ParamSpec((str(i),), tuple(p.shape), p.dtype) for i, p in enumerate(params)],
            bucket_bytes=setup.bucket_bytes,
            first_bucket_bytes=merge,
            grad_dtype=DTYPES[setup.grad_dtype],
            unit_of=units if by_unit else [min(unit, 1) for unit in units],
            flags=not by_unit,
        )
        shapes = tuple(tuple(p.shape) for p in params)
        names = tuple(inside.get(p, "") for p in params)
        return GPTBuckets(shapes, names, layout, 1, DTYPES[setup.grad_dtype].itemsize, (0, 0))


def _drop(p: Any) -> None:
    p.grad = None


def _first(args: Any, kwargs: Any) -> Any:
    """The features that a block is called with."""
    return args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))


def _run_block(block: nn.Module, args: Any, kwargs: Any) -> tuple[float, float]:
    """(kept, needs) of Sizes."""

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().requires_grad_(x is first and x.is_floating_point())

    first = _first(args, kwargs)
    args, kwargs = tree_map(own, (args, kwargs))
    live = _Live(block, (args, kwargs))
    with live:
        out = block(*args, **kwargs)
        y = out if isinstance(out, Tensor) else out[0]
        del out
        kept = live.now()
        live.taken()
        y.backward(torch.empty_like(y))
    largest = max((p.nbytes for p in block.parameters() if p.requires_grad), default=0)
    return float(kept), max(0.0, float(live.taken() - kept - largest))


def _plan_of(model: Any) -> dict[str, Any]:
    """Pattern of modules -> how tp splits them; see [Note: tp by plan]."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    if not plan and model.config.model_type == "gpt2":
        return dict(GPT2)
    return plan


def _split_all(model: Any, tp: int) -> None:
    """Shrinks a model with a plan to a rank's part.

    Raises:
        SplitError: tp does not divide it, or a style that is not known here.
    """
    plan = _plan_of(model)
    for name in ("num_attention_heads", "num_key_value_heads") if plan else ():
        heads = getattr(model.config, name, None)
        if isinstance(heads, int) and heads % tp:
            raise SplitError(f"tp={tp} does not divide {name}={heads}")
    for pattern, style in plan.items():
        _split(model, pattern, style, tp)


def _split(model: Any, pattern: str, style: Any, tp: int) -> None:
    for name in fnmatch.filter([name for name, _ in model.named_modules()], pattern):
        module, how = model.get_submodule(name), _STYLES.get(style, style)
        if isinstance(how, str):
            raise SplitError(f"tp above 1: transformers splits '{name}' by {style}")
        if isinstance(how, Divide):
            vars(module).update(how.of_rank(module, tp))
        elif isinstance(how, Column | Row | Vocab | Head):
            _shrink(module, name, tp, rows=isinstance(how, Row))
        if isinstance(how, Head):  # the logits of all ranks
            forward = module.forward
            module.forward = lambda x, forward=forward: torch.cat([forward(x)] * tp, -1)


def _shrink(module: Any, name: str, tp: int, *, rows: bool) -> None:
    """Cut a module's weights by output features; rows: by input features."""
    turned = type(module).__name__ == "Conv1D"  # [in, out]
    for key, p in [*module.named_parameters(recurse=False)]:
        if p.dim() == 1 and rows:
            continue
        dim = int(rows != turned) if p.dim() > 1 else 0
        if p.shape[dim] % tp:
            raise SplitError(f"tp={tp} does not divide '{name}.{key}', {list(p.shape)}")
        part = p.detach().narrow(dim, 0, p.shape[dim] // tp)
        setattr(module, key, nn.Parameter(torch.empty_like(part), requires_grad=p.requires_grad))
    if turned and not rows:
        module.nf //= tp


class _Table(Table):
    """The table of a rank of a FolderModel."""

    def __init__(self, model: FolderModel, setup: Setup, sizes: Sizes) -> None:
        self.setup, self.own = setup, sizes.own
        full = setup.recompute.activation_checkpointing == "full"
        tables = [m.weight for m in model.model.modules() if isinstance(m, nn.Embedding)]
        rows, width = max((p.shape for p in tables), key=lambda shape: shape[0] * shape[1])
        self.table, self.residual = (rows, width), 0.0
        head = model.model.get_output_embeddings()
        self.tied = head is not None and any(head.weight is p for p in tables)
        tokens = setup.micro_batch_size * sizes.length
        self.batch = 16.0 * tokens + sizes.before + self.own * full
        self.of_loss = 0.0, sizes.loss
        blocks = []
        for kind, (kept, needs) in enumerate(zip(sizes.kept, sizes.needs)):
            block = model.blocks[model.kinds.index(kind)]
            n = sum(p.numel() for p in block.parameters() if p.requires_grad)
            again, last = (kept, self.own) if full else (0.0, 0.0)
            steps = (Step(kept, needs, n),)
            blocks.append(Block(self.own if full else kept, again, steps, last))
        self.blocks = blocks


@dataclass(frozen=True)
class Fit:
    """A layout of a model, and its memory."""

    setup: Setup
    memory: Memory
    fits: bool


def predict_folder(model: FolderModel, setup: Setup, sizes: Sizes) -> Memory:
    """The peak of a step of a model on a rank."""
    buckets = model.buckets(setup)
    table, parts = _Table(model, setup, sizes), RankParts((model.kinds,), True, True)
    held = Held(0, (1,))
    return peak_of(table, parts, held, buckets, states_of(None, setup, buckets), 0.0)


def load(folder: str, dtype: str) -> Any:
    """The model of a folder on the meta device.

    Raises:
        ValueError: transformers is missing, or knows no such model.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError(
            f"plan: --model {folder} needs the package transformers; pip install transformers"
        ) from None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(
            f"plan: transformers cannot make a causal language model of {folder}/config.json: "
            f"{error}"
        ) from None
    model.tie_weights()
    return model.to(DTYPES[dtype]).train()


def longest(config: Any) -> int:
    """Tokens of a sequence that a model allows, at most LONGEST."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    lengths = (getattr(config, name, None) for name in names)
    return min(LONGEST, next((n for n in lengths if isinstance(n, int) and n > 0), LONGEST))


def fits_of(
    model: Any, template: Setup, *, batch: int, length: int, per_node: int, limit_bytes: float
) -> tuple[list[Fit], list[str]]:
    """Of each tp, stage and mode the largest micro-batch that fits; else one of one sequence.
    And why numbers of tp are left out.

    Raises:
        ValueError: a batch that no layout divides; a model whose code needs values.
    """
    fits: list[Fit] = []
    left_out = dict[str, None]()
    whole = None
    for tp in divisors(per_node):
        ranks = template.world_size // tp
        if template.world_size % tp or batch % ranks:
            continue
        try:
            split = FolderModel(model, tp)
            one, two = (split.sizes(n, length) for n in (1, 2))
        except SplitError as error:
            left_out[str(error)] = None
            continue
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"plan: {type(model).__name__} does not run on the meta device with tp={tp} "
                f"({error}); use a model whose code needs no values of tensors"
            ) from error
        numel = sum(p.numel() for p in split.params)
        if tp > 1 and numel == whole:  # nothing is split
            continue
        whole = whole or numel
        for stage, mode in itertools.product(range(4 if ranks > 1 else 1), ("none", "full")):
            fits.append(_largest(split, template, (tp, stage, mode), one, two, batch, limit_bytes))
    if not fits:
        raise ValueError(
            f"plan: expected batch_size as a multiple of the data-parallel ranks, got batch_size="
            f"{batch} with gpus={template.world_size}; use --batch-size {template.world_size}"
        )
    return fits, [*left_out]


def _largest(
    model: FolderModel,
    template: Setup,
    how: tuple[int, int, str],
    one: Sizes,
    two: Sizes,
    batch: int,
    limit_bytes: float,
) -> Fit:
    tp, stage, mode = how
    base = template.change(tp=tp, zero_stage=stage, activation_checkpointing=mode)
    best: Fit | None = None
    for micro in divisors(batch // base.dp):
        setup = base.change(micro_batch_size=micro, grad_accum_steps=batch // base.dp // micro)
        memory = predict_folder(model, setup, one.at(two, micro))
        fit = Fit(setup, memory, memory.total <= limit_bytes)
        best = fit if best is None or fit.fits else best
        if not fit.fits:
            break
    assert best is not None
    return best


def make_fits(command: Any, template: Setup, per_node: int, limit_bytes: float) -> FolderPlan:
    """Plans the model of command.model, a folder.

    Args:
        command: predict.plan.PlanCommand.
    Raises:
        ValueError: options of fastpar's own GPT; no such model; as fits_of().
    """
    for name in OF_GPTS:
        if getattr(command, name) != getattr(type(command), name, None):
            raise ValueError(
                f"plan: {option(name)} is for models of `fastpar train`, not for a folder; drop it"
            )
    model = load(command.model, template.dtype)
    length = command.block_size or longest(model.config)
    batch = command.batch_size or max(template.world_size, TOKENS // length)
    fits, left_out = fits_of(
        model, template, batch=batch, length=length, per_node=per_node, limit_bytes=limit_bytes
    )
    fits.sort(
        key=lambda fit: (not fit.fits, fit.setup.tp, _has_full(fit), fit.setup.parallel.zero_stage)
    )
    n = sum(p.numel() for p in model.parameters())
    plan = {} if model.config.model_type == "gpt2" else _plan_of(model)
    short = {k: type(_STYLES[how]).__name__.lower() for k, how in plan.items() if how in _STYLES}
    return FolderPlan(type(model).__name__, n, batch, length, short, fits, left_out)


def _has_full(fit: Fit) -> bool:
    return fit.setup.recompute.activation_checkpointing == "full"


@dataclass(frozen=True)
class FolderPlan:
    """A model, and its layouts: those that fit first, the simplest of them before others."""

    kind: str
    n_parameters: int
    batch: int
    length: int
    tp_plan: dict[str, str]  # for parallelize(), unless it has one itself
    fits: Sequence[Fit]
    left_out: Sequence[str]

    def lines(self, limit_bytes: float) -> list[str]:
        """The report."""
        text = f"{self.batch} sequences of {self.length:,} tokens"
        lines = [
            f"model    {self.kind}: {self.n_parameters:,} parameters",
            f"step     {text} (--batch-size, --block-size); times are not predicted",
            f"memory   {size_text(limit_bytes)} per rank for tensors",
            "",
        ]
        rows = [("layout", "micro-batch", "recompute", "peak", "")]
        for fit in self.fits:
            s, fits = fit.setup, "fits" if fit.fits else "does not fit"
            mode = s.recompute.activation_checkpointing
            micro = f"{s.micro_batch_size} x {s.grad_accum_steps}"
            rows.append((layout_text(s), micro, mode, size_text(fit.memory.total), fits))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += [f"left out {why}" for why in self.left_out]
        best = self.fits[0]
        lines += ["", f"peak     {best.memory} on {layout_text(best.setup)}"]
        s = best.setup
        mesh = f"fastpar.Mesh(tp={s.tp})" if s.tp > 1 else "fastpar.Mesh()"
        plan = ", tp_plan=plan" if s.tp > 1 and self.tp_plan else ""
        if plan:
            lines += ["plan = {", *(f'    "{k}": "{v}",' for k, v in self.tp_plan.items()), "}"]
        stage = s.parallel.zero_stage
        lines.append(f"fastpar.parallelize(model, {mesh}, zero_stage={stage}{plan})")
        return lines

    def rows(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [
            {
                **fit.setup.in_effect(),
                "fits": fit.fits,
                "memory_bytes": {**vars(fit.memory), "total": fit.memory.total},
            }
            for fit in self.fits
        ]
