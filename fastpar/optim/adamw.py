"""fastpar.AdamW: torch.optim.AdamW's interface with one kernel call for all groups.

A step is three launches on a GPU: two for the gradient norm, whose clip factor is a tensor argument
of the third, so clipping costs no further pass over the gradients and no wait.

Step counters: as in torch, a parameter's counter is a tensor on the host, so that bias corrections
need not wait for the device; with capturable=True it is on the parameter's device. A skipped step
must not count, and on a GPU only the device knows that it was skipped: with a loss scale counters
move to the device too, and the kernel reads them there.

Random bits: an element's random bits depend on the seed, the step, its parameter's name in the
model and its index in the whole parameter: no split into ranks, stages or experts changes them, nor
does the order of the optimizer's list. Without an engine the name is that passed to the optimizer,
else the position in the list. Parts of a parameter that tensor parallelism cuts into several runs
of elements have their own bits.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.comm.collectives import capturing
from fastpar.engine.engine import engine_of_parameter
from fastpar.kernels.adamw import MOMENT_BLOCK, CountedSteps, Hyper, adamw_step_, is_dense
from fastpar.kernels.lists import goes_at_once, same_entries
from fastpar.optim.base import (
    EngineOptimizer,
    Row,
    Rows,
    check_ranges,
    pair,
    plain,
    scalar,
    where,
)
from fastpar.optim.state import (
    ENTRIES,
    Storage,
    add_master,
    master_entry,
    moment_names,
    torch_state,
    whole_shape,
)

_ONE = torch.ones((), dtype=torch.float32, device="cpu")
_HOST = torch.device("cpu")
_NUMBERS = {float, int}


def _check_seed(seed: int) -> None:
    """Refuse a seed that is not a 63-bit number."""
    if not isinstance(seed, numbers.Integral) or not 0 <= seed < 1 << 63:
        raise ValueError(f"AdamW: expected 0 <= seed < 2**63, got seed={seed!r}; use 0")


def _check_memory(group: dict[str, Any], i: int) -> None:
    """Refuse views with gaps, which are not flat memory. Engines check their own parameters."""
    for position, p in enumerate(group["params"]):
        if engine_of_parameter(p) is None and (p.is_neg() or not is_dense(p)):
            what = "negated lazily" if p.is_neg() else f"with strides {p.stride()}"
            raise ValueError(
                f"AdamW: expected parameters in contiguous memory, got "
                f"{where(group, i, position)}, {list(p.shape)}, a view {what}; make its base tensor"
                " the parameter, or a copy: torch.nn.Parameter("
                "p.detach().clone(memory_format=torch.contiguous_format))"
            )


def _check_overlap(groups: list[dict[str, Any]]) -> None:
    """Refuse parameters that share memory, which would be updated twice.

    Engines check their own; parameters that are gathered later share one element until then.
    """
    spans = []
    for i, group in enumerate(groups):
        for position, p in enumerate(group["params"]):
            if engine_of_parameter(p) is not None:
                continue
            if p.numel() and p.layout is torch.strided and p.device.type != "meta":
                last = sum((n - 1) * stride for n, stride in zip(p.shape, p.stride()))
                start, size = p.data_ptr(), (last + 1) * p.element_size()
                spans.append((str(p.device), start, start + size, where(group, i, position)))
    spans.sort()
    for (device, _, stop, name), (other, start, _, other_name) in itertools.pairwise(spans):
        if device == other and start < stop:
            raise ValueError(
                f"AdamW: expected parameters in separate memory, got {other_name} overlapping "
                f"{name}; pass a tied weight once, and views as one parameter"
            )


class _Plan(NamedTuple):
    """What a step may repeat while parameters, states and groups are the same objects."""

    params: Sequence[Tensor]
    groups: Sequence[int]
    positions: Sequence[int]
    used: list[int]  # the groups, each once
    kinds: list[tuple[bool, bool, bool]]  # theirs
    keys: list[Any]  # of the optimizer's state
    values: list[Any]
    states: list[dict[str, Any]]  # of the rows
    names: list[str]  # of entries
    entries: list[list[Tensor]]  # of each name, those of the rows
    steps: CountedSteps


class AdamW(EngineOptimizer):
    """AdamW: torch.optim.AdamW's signature, plus options for mixed-precision training.

    Works on parallelized models as it is: step() first finishes the engine's reduction, so
    gradients are means over the ranks, and main gradients (parallelize(grad_dtype=...)) are used.
    Parameters without a gradient are skipped.

    Args:
        params: parameters, named parameters, or groups; options up to fused may differ per group.
        lr, betas, eps, weight_decay: numbers or tensors of one element. A tensor on the parameters'
            GPU is read by the kernel; one on the host when step() is called.
        amsgrad: divide by the largest second moment so far.
        maximize: ascend instead of descend.
        foreach, fused: accepted for compatibility with torch; the only implementation is both.
        capturable: keep counters on the parameters' device, which step() never reads, so that the
            step can be captured in a CUDA graph after a first step outside of it.
        differentiable: not supported.
        master_weights: True keeps an fp32 copy of bf16 and fp16 parameters; "remainder" only the
            16 bits that bf16 parameters lack, with the same results.
        stochastic_rounding: update bf16 parameters without a master, rounding up or down at random
            without bias.
        seed: of stochastic rounding, of moments too; the same seed gives the same run. Saved.
        moment_dtype: torch.float32, torch.bfloat16 or torch.uint8 (8 bits, and a scale for each 256
            elements); the latter two are rounded stochastically. fp64 parameters have fp64 moments.
        max_grad_norm: scale gradients so that their norm over all groups is at most this; infinity
            only measures. The factor is min(1, max_grad_norm / (norm + 1e-6)), as in
            torch.nn.utils.clip_grad_norm_; gradients themselves are not changed.
        zero_grad_in_step: zero the used gradients in the same pass, in skipped steps too, like
            zero_grad(set_to_none=False). Not with zero_stage >= 1.
    Attributes:
        grad_norm: fp32 tensor [], of the last step, over all shards, before clipping, after
            division by grad_scale and by the engine's count of tokens; None if it was not needed:
            no max_grad_norm, and no loss scale or one whose overflows found_inf reports.
        grad_scale: the loss scale, divisor of gradients; 1 by default.
        found_inf: tensor of one element, nonzero if the gradients are known to be not finite.
            torch.amp.GradScaler sets both around step(); a training loop may do so too, on all
            ranks: their flags are added at zero_stage >= 1. Not with tp or a pipeline.
        skipped: whether the last step changed nothing because its gradients were not finite; the
            same on all ranks. Happens only after grad_scale or found_inf was set. Reading it on a
            GPU waits for the step. Without a loss scale, non-finite gradients enter the parameters,
            as with torch.optim.AdamW.
    Ranks: all ranks of the model's mesh call step(); at zero_stage >= 1 or with tp > 1 also
        state_dict() and torch_state_dict().
    State: at zero_stage >= 1, or with tp > 1, each rank keeps the state of its elements;
        state_dict() is whole, on the CPU of every rank, and load_state_dict() takes a whole one.
        fastpar/optim/state.py lists the entries. State dicts of torch.optim.AdamW load here, and
        these load there (with 8-bit moments: torch_state_dict()). A state saved with any storage
        options loads with any others. Load the model before its state and before the first step,
        as master weights are made then.
    Raises:
        ValueError: options outside their range or that contradict each other; 16-bit parameters
            without master weights or stochastic rounding; parameters that overlap; the state of
            another model, or of Adam.
        RuntimeError: sparse gradients; a CUDA graph captures a step that is not capturable; the
            model was parallelized after the optimizer was built.
    """

    steps_on_host = True
    _plan: _Plan | None = None
    _attributes: tuple[str, ...] = ("storage", "seed", "zero_grad_in_step")
    _in_state_dict = frozenset({"seed"})
    _not_in_groups: tuple[str, ...] = (
        *("master_weights", "stochastic_rounding", "seed"),
        *("moment_dtype", "max_grad_norm", "zero_grad_in_step"),
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool | str = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        moment_dtype: torch.dtype = torch.float32,
        max_grad_norm: float | None = None,
        zero_grad_in_step: bool = False,
    ) -> None:
        self.set_max_grad_norm(max_grad_norm)
        _check_seed(seed)
        self.master_weights = master_weights
        self.storage = Storage(master_weights, stochastic_rounding, moment_dtype)
        self.seed = seed
        self.zero_grad_in_step = zero_grad_in_step
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "foreach": foreach, "capturable": capturable,
            "differentiable": differentiable, "fused": fused, "decoupled_weight_decay": True,
        }  # fmt: skip
        super().__init__(params, defaults)

    # Groups

    def _check_options(self, group: dict[str, Any], caller: str) -> None:
        beta1, beta2 = pair(caller, "betas", group["betas"])
        ranges = {
            "lr": (group["lr"], 0.0, math.inf),
            "betas[0]": (beta1, 0.0, 1.0),
            "betas[1]": (beta2, 0.0, 1.0),
            "eps": (group["eps"], 0.0, math.inf),
            "weight_decay": (group["weight_decay"], 0.0, math.inf),
        }
        check_ranges(caller, ranges)
        for name, only, advice in (
            ("differentiable", False, "use torch.optim.AdamW to differentiate through a step"),
            ("decoupled_weight_decay", True, "continue that run with its own optimizer"),
        ):
            if group[name] != only:
                raise ValueError(
                    f"{caller}: expected {name}={only}, got {name}={group[name]}; {advice}"
                )
        if group["foreach"] and group["fused"]:
            raise ValueError(
                f"{caller}: expected at most one of foreach and fused, got foreach=True and "
                "fused=True; drop both: there is one implementation"
            )

    def _check_parameter(self, p: Tensor, group: dict[str, Any]) -> None:
        self.storage.check(p, amsgrad=group["amsgrad"])
        engine = engine_of_parameter(p)
        if (
            self.zero_grad_in_step
            and engine is not None
            and (engine.stage.number or engine.shards.storage.where)
        ):
            raise ValueError(
                "AdamW: zero_grad_in_step does not work with zero_stage >= 1 or offload, got "
                f"zero_stage={engine.stage.number}, offload={engine.shards.storage.where}; drop "
                "it: the engine frees gradients itself"
            )

    def _check_memory(self) -> None:
        _check_memory(self.param_groups[-1], len(self.param_groups) - 1)
        _check_overlap(self.param_groups)

    # The step

    def _check_capture(self) -> None:
        first = next((group["params"][0] for group in self.param_groups if group["params"]), None)
        if first is None or not capturing(first.device):
            return
        if not all(g["capturable"] for g in self.param_groups):
            raise RuntimeError(
                "AdamW.step: capturing a CUDA graph needs capturable=True; pass it, or step "
                "outside of the capture"
            )
        for engine in self.engines():
            if engine.control_group is not None and not engine.control.captured:
                raise RuntimeError(
                    "AdamW.step: capturing a CUDA graph needs one rank or fastpar.graphed, got "
                    f"{engine.sharing}, where the ranks' hosts agree on each step; step outside of "
                    "the capture"
                )

    def _update(
        self, rows: Rows | list[Row], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        rows = Rows.of(rows)
        if self._step_as_planned(rows, factor, found_inf):
            return
        batches = self._batches(rows)
        for device, batch in batches:
            factor, found_inf = (t if t is None else t.to(device) for t in (factor, found_inf))
            self._call(batch, device, factor, found_inf)()
        self._plan = self._planned(rows) if len(batches) == 1 else None

    def _planned(self, rows: Rows) -> _Plan | None:
        """What the next step may repeat, after one that has completed the states."""
        used = [*dict.fromkeys(rows.groups)]
        groups, dtype = [self.param_groups[i] for i in used], rows.pieces[0].dtype
        if any(g["capturable"] for g in groups) or any(p.dtype != dtype for p in rows.pieces):
            return None  # counters on the device, masters of some
        moments = moment_names(amsgrad=False)
        names: list[str | None] = [*map(self.storage.moment_entry, moments)]
        names += ["max_exp_avg_sq" if groups[0]["amsgrad"] else None]
        names += [master_entry(dtype, self.master_weights)]
        scales = self.storage.moment_dtype == torch.uint8
        names += ["exp_avg_scale", "exp_avg_sq_scale"] if scales else [None, None]
        states = [self.state[p] for p in rows.params]
        columns = [[s[n] for s in states] if n else [] for n in names]
        counters = [s["step"] for s in states]
        if not goes_at_once(itertools.chain(*columns, counters)):
            return None
        firsts = self._first_indices(rows) if self.storage.random else []
        places = [used.index(i) for i in rows.groups], firsts
        return _Plan(
            rows.params, rows.groups, rows.positions, used, self._kinds(used), [*self.state],
            [*self.state.values()], states, [*filter(None, names), "step"],
            [*filter(None, columns), counters], CountedSteps(columns, counters, *places),
        )  # fmt: skip

    def _kinds(self, used: list[int]) -> list[tuple[bool, bool, bool]]:
        groups = [self.param_groups[i] for i in used]
        return [(g["maximize"], g["amsgrad"], g["capturable"]) for g in groups]

    def _step_as_planned(self, rows: Rows, factor: Tensor | None, found_inf: Tensor | None) -> bool:
        """Make a step like the last one: of the same parameters and states, with other gradients.
        False, and nothing was done: something has changed, or this is no step for the kernel."""
        plan = self._plan
        if (
            plan is None
            or not _same(rows.params, plan.params)
            or (rows.groups, rows.positions) != (plan.groups, plan.positions)
            or plan.kinds != self._kinds(plan.used)
            or not same_entries(
                self.state, plan.keys, plan.values, plan.states, plan.names, plan.entries
            )
        ):
            return False
        like = rows.pieces[0]
        on_other = [t.device != like.device for t in (factor, found_inf) if t is not None]
        if any(on_other) or (found_inf is not None and like.device.type != "cpu"):
            return False
        hypers: list[Hyper] = []
        for i in plan.used:
            group = self.param_groups[i]
            values = group["lr"], *group["betas"], group["eps"], group["weight_decay"], 1.0
            usual = {*map(type, values)} <= _NUMBERS
            if not usual and any(isinstance(value, Tensor) for value in values):
                return False
            hypers.append(Hyper._make(values))
        zeroes, seed = self.zero_grad_in_step, self.seed if self.storage.random else None
        table = rows.table(zero_grad=zeroes)
        how = hypers, factor, found_inf, plan.kinds[0][0], zeroes, seed
        return table is not None and plan.steps.step(table, like, *how)

    def prepare(self, rows: list[Row], factor: Tensor | None) -> list[Callable[[], object]]:
        """The kernel calls of a step with the present options, for another thread.

        Args:
            factor: of the gradients; read by the calls.
        """
        return [self._call(batch, device, factor, None) for device, batch in self._batches(rows)]

    def _batches(self, rows: Rows | list[Row]) -> list[tuple[torch.device, list[Row]]]:
        batches: dict[tuple, list[Row]] = {}
        for row in rows:
            group = self.param_groups[row.group]
            key = (row.piece.device, group["maximize"], group["amsgrad"])
            batches.setdefault(key, []).append(row)
        return [(device, batch) for (device, _, _), batch in batches.items()]

    def _call(
        self, rows: list[Row], device: torch.device, factor: Tensor | None, found_inf: Tensor | None
    ) -> Callable[[], object]:
        """The kernel call that steps rows with one device, maximize and amsgrad."""
        options, storage = self.param_groups[rows[0].group], self.storage
        amsgrad, eight_bit = options["amsgrad"], storage.moment_dtype == torch.uint8
        # Groups whose counters the kernel reads: see "Step counters" above.
        skipping_on_gpu = found_inf is not None and device.type != "cpu"
        on_device = [g["capturable"] or skipping_on_gpu for g in self.param_groups]
        dtypes = {row.piece.dtype for row in rows}
        kept: dict[torch.dtype, Any] = {d: master_entry(d, self.master_weights) for d in dtypes}
        states = [self._state(r, on_device[r.group], kept[r.piece.dtype]) for r in rows]
        counted = [s["step"] for row, s in zip(rows, states) if on_device[row.group]]
        if counted:
            _count(counted, 1.0 if found_inf is None else 1.0 - found_inf.ne(0).float())
        numbered = [s["step"] for row, s in zip(rows, states) if not on_device[row.group]]
        owned = [(row, s) for row, s in zip(rows, states) if row.grad.numel()]
        call: Callable[[], object] = tuple
        if owned:  # a rank may own no element of them
            rows, states = zip(*owned)
            hypers, hyper_index = self._hypers(rows, states, on_device, device)
            exp_avg, exp_avg_sq = map(storage.moment_entry, moment_names(amsgrad=False))
            call = functools.partial(
                adamw_step_,
                [row.piece for row in rows],
                [row.grad for row in rows],
                [s[exp_avg] for s in states],
                [s[exp_avg_sq] for s in states],
                hypers,
                hyper_index=hyper_index,
                master_weights=[s.get(kept[row.piece.dtype]) for row, s in owned],
                max_exp_avg_sqs=[s["max_exp_avg_sq"] for s in states] if amsgrad else None,
                exp_avg_scales=[s["exp_avg_scale"] for s in states] if eight_bit else None,
                exp_avg_sq_scales=[s["exp_avg_sq_scale"] for s in states] if eight_bit else None,
                grad_scale=factor,
                found_inf=found_inf,
                maximize=options["maximize"],
                zero_grad=self.zero_grad_in_step,
                stochastic_rounding_seed=self.seed if storage.random else None,
                first_indices=self._first_indices(rows) if storage.random else None,
            )

        def step() -> None:
            call()
            if numbered and (found_inf is None or not found_inf.item()):
                _count(numbered)

        return step

    def _first_indices(self, rows: Iterable[Row]) -> list[int]:
        """Index of each piece's first element among the random bits; see "Random bits"."""
        given: dict[Tensor, str] = {}
        for group in self.param_groups:
            given.update(zip(group["params"], group.get("param_names", ())))
        return [self._first_index(row, given.get(row.param, str(row.position))) for row in rows]

    def _first_index(self, row: Row, name: str) -> int:
        start = row.start
        if row.engine is not None:
            shards = row.engine.shards
            name = shards.name_of(row.param)
            if shards.declared is not None and shards.is_split(row.param):
                runs = shards.declared.runs(row.param)
                whole = [r.start for r in runs if len(runs) == r.count == 1 and r.start >= 0]
                blocks = MOMENT_BLOCK if self.storage.moment_dtype == torch.uint8 else 1
                if whole and not whole[0] % blocks:
                    start += whole[0]
                else:
                    name += f" {shards.part_of(row.param)}"
        return _random_place(name) + start

    def _state(self, row: Row, on_device: bool, master: str | None) -> dict[str, Any]:
        """The state of a parameter, made or completed as needed."""
        p, amsgrad = row.piece, self.param_groups[row.group]["amsgrad"]
        state = self.state.get(row.param)
        if not state:
            if capturing(p.device):
                raise RuntimeError(
                    "AdamW.step: a CUDA graph would capture the creation of the state, and each "
                    "replay would begin anew; call step() once before the capture"
                )
            state = self.state[row.param] = self.storage.new_state(p, amsgrad=amsgrad)
        elif amsgrad and "max_exp_avg_sq" not in state:  # switched on later
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
        if master is not None and master not in state:
            add_master(state, p, self.master_weights)
        device = p.device if on_device else _HOST
        step = state["step"]
        if step.device != device or (on_device and step.dtype != torch.float32):
            state["step"] = step.to(device, torch.float32 if on_device else step.dtype)
        return state

    def _hypers(
        self,
        rows: Sequence[Row],
        states: Sequence[dict[str, Any]],
        on_device: list[bool],
        device: torch.device,
    ) -> tuple[list[Hyper], list[int]]:
        """(scalars, one entry per group and count; index of each row's entry)."""
        names = ("lr", "eps", "weight_decay")
        scalars = [
            [scalar(v, device) for v in (*(group[n] for n in names), *group["betas"])]
            for group in self.param_groups
        ]
        hypers: list[Hyper] = []
        index: list[int] = []
        known: dict[tuple[int, float], int] = {}
        for row, state in zip(rows, states):
            step, by_kernel = state["step"], on_device[row.group]
            t = step if by_kernel else step.item() + 1.0
            # Counters on the device cannot be compared here: each has its own entry.
            key = (row.group, id(step) if by_kernel else t)
            if key not in known:
                known[key] = len(hypers)
                lr, eps, weight_decay, beta1, beta2 = scalars[row.group]
                hypers.append(Hyper(lr, beta1, beta2, eps, weight_decay, t))
            index.append(known[key])
        return hypers, index

    # State

    def entry_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """The whole shape of every entry that a parameter's state may have."""
        shape = whole_shape(p)
        scales = torch.Size([-(-shape.numel() // MOMENT_BLOCK)])
        shapes = {name: scales if name.endswith("_scale") else shape for name in ENTRIES}
        return {"step": torch.Size(), **shapes}

    def _required(self, p: Tensor, group: dict[str, Any]) -> list[list[tuple[str, ...]]]:
        moments = moment_names(group["amsgrad"])
        return [[("step",)], *([(m,), (f"{m}_codes", f"{m}_scale")] for m in moments)]

    def _convert_moments(
        self, saved: dict[str, Any], p: Tensor, group: dict[str, Any], *, copy: bool
    ) -> dict[str, Any]:
        entries = {k: v for k, v in saved.items() if k not in ("step", *ENTRIES)}  # unknown entries
        for name in moment_names(group["amsgrad"]):
            entries.update(self.storage.convert_moment(saved, name, p, copy=copy))
        return entries

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plan = None  # it would keep the old state alive
        super().__setstate__(state)

    def state_dict(self) -> dict[str, Any]:
        """Like torch's, with the seed if steps draw random bits: see Ranks and State above."""
        state_dict = super().state_dict()
        if self.storage.random:
            state_dict["seed"] = self.seed
        return state_dict

    def torch_state_dict(self) -> dict[str, Any]:
        """state_dict() in the form of torch.optim.AdamW: moments are fp32 copies."""
        with self._whole_state():
            state_dict = plain(torch.optim.Optimizer.state_dict)(self)
        params = list(itertools.chain.from_iterable(g["params"] for g in self.param_groups))
        state = {i: torch_state(s, params[i]) for i, s in state_dict["state"].items()}
        return {"state": state, "param_groups": state_dict["param_groups"]}


@functools.cache
def _random_place(name: str) -> int:
    """The start of a parameter among 2^62 random numbers: two hardly ever overlap."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "little") // 4 // MOMENT_BLOCK * MOMENT_BLOCK


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether two lists have the same objects."""
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _count(counters: list[Tensor], by: Tensor | float = _ONE) -> None:
    if not isinstance(by, Tensor):
        torch._foreach_add_(counters, by)
    else:  # a tensor and alpha: torch would make a tensor of a number for each counter
        torch._foreach_add_(counters, by, alpha=1.0)
