"""fastpar.Muon: updates matrices by the orthogonal factor of their momentum.

For the gradient G of a matrix W [m, n], with the options of torch.optim.Muon:

    M = momentum M + (1 - momentum) G
    O = orthogonalize((1 - momentum) G + momentum M)       (without nesterov: of M)
    W = W - lr weight_decay W - lr scale O                 scale = sqrt(max(1, m / n))

Options beyond torch's, each off by default:

    matrices=k       W is k matrices one below another, each with its own O: GPT-2's q, k, v

Groups with adamw=True are stepped by fastpar.AdamW in the same object: embeddings, heads, biases
and gains of norms. muon_groups(model) makes the groups of a GPT-2.

Single roundings: a rank steps pieces of any length and offset. torch's fused a + b * c rounds once
in whole vectors and twice in the rest at the end, so each operation here rounds once.

Owners: an update that needs a whole matrix is computed once, on its owner, in three hops:

    pieces along dp --all_to_all--> slices along tp --all_to_all--> whole, on the owner: compute
    pieces along dp <--all_to_all-- slices along tp <--all_to_all-- its result

The result depends on the whole matrix alone, so its bits are those of one process at any stage, dp
and tp (on a GPU in deterministic mode: kernels/orthogonalize.py, [Note: many at once]). At stage 0
every rank has the gradient, and the first hop is not needed. Replicas of a sharded model and stages
of a pipeline work independently. All first hops are launched before the first wait, bucket after
bucket, and the results of a bucket are sent while those of the next are computed. Temporary memory:
the exchanged pieces, and the products of one matrix, on a GPU of some matrices.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fastpar.axes.experts.mixture import Router
from fastpar.comm.collectives import Collectives, Handle, capturing, started
from fastpar.engine.engine import Engine, engine_of_parameter
from fastpar.kernels.adamw import store_values, values_of
from fastpar.kernels.orthogonalize import POLAR_EXPRESS, TOGETHER, orthogonalize_each
from fastpar.nn.modules import is_conv1d
from fastpar.optim.adamw import AdamW
from fastpar.optim.base import Row, Rows, check_ranges
from fastpar.optim.state import add_master, whole_shape
from fastpar.sharding.layout import parameter_names

# Whole matrices by parameter -> result of the same shape of each.
Compute = Callable[[dict[Tensor, Tensor]], dict[Tensor, Tensor]]
T = TypeVar("T")


class Owner(NamedTuple):
    """A rank, by its number along dp and along tp."""

    dp: int
    tp: int


class _Message(NamedTuple):
    """Data in an all_to_all; sent: kept alive until it ends."""

    received: Tensor
    handle: Handle | None
    sent: Tensor


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """Assign jobs to ranks: the longest first, to the rank with the least work (Graham 1969)."""
    loads, places = [(0.0, rank) for rank in range(ranks)], [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, places[job] = loads[0]
        heapq.heapreplace(loads, (load + costs[job], places[job]))
    return places


class Owners:
    """The owners of some matrices of one engine; see "Owners" above.

    Args:
        params: the matrices, the same on every rank.
        costs: of computing each.
    """

    def __init__(self, engine: Engine, params: Sequence[Tensor], costs: Sequence[float]) -> None:
        self.shards = shards = engine.shards
        self.sharded, mesh = shards.stage.shards, shards.mesh
        groups = shards.bucket_of(params[0]).groups  # type: ignore[arg-type]
        dp = groups.gather if self.sharded else groups.reduce
        self.dp = None if dp is None else dp.exact
        declared = shards.declared
        if mesh.tp_grid is not None:
            raise ValueError(
                "Muon: does not support tp_grid="
                f"{'x'.join(map(str, mesh.tp_grid))}; use fastpar.AdamW, or Mesh(tp=)"
            )
        self.tp = None if declared is None or declared.tp is None else declared.tp.group
        self.n_dp, self.n_tp = (1 if g is None else g.world_size for g in (self.dp, self.tp))
        self.me = Owner(0 if self.dp is None else self.dp.rank, mesh.tp_rank)
        places = assign(costs, self.n_dp * self.n_tp)
        self.owner = {p: Owner(*divmod(place, self.n_tp)) for p, place in zip(params, places)}
        self.batches: list[list[Tensor]] = [
            [p for p in bucket.params if p in self.owner]
            for bucket in shards.buckets
            if any(p in self.owner for p in bucket.params)
        ]

    def run(
        self, pieces: dict[Tensor, Tensor], compute: Compute
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, this rank's piece of its result) of every matrix.

        Args:
            pieces: this rank's piece of each matrix, of one dtype; removed one after another.
        Ranks: all of the engine's mesh, with the same parameters.
        """
        self._like = next(iter(pieces.values())).new_empty(0)
        given = [[p for p in batch if p in pieces] for batch in self.batches]
        incoming = [self._gather(batch, pieces, i) for i, batch in enumerate(given)]
        outgoing = []
        for i, batch in enumerate(given):
            whole = self._join(batch, self._whole_along_dp(batch, pieces, incoming), i)
            results: dict[Tensor, Tensor] = {}
            for some in _some(list(whole), lambda p: p):
                results |= compute({p: whole.pop(p) for p in some})
            message = self._send_slices(batch, results, i)
            del results
            if self.n_tp == 1:
                message = self._send_pieces(batch, self._slices(batch, message), i)
            outgoing.append(message)
        if self.n_tp > 1:
            slices = [self._slices(batch, m) for batch, m in zip(given, outgoing)]
            outgoing = [self._send_pieces(b, s, i) for i, (b, s) in enumerate(zip(given, slices))]
        for batch, message in zip(given, outgoing):
            yield from self._pieces(batch, message)

    # Ranges

    def _range(self, p: Tensor, rank: int) -> tuple[int, int]:
        """The elements of this rank's tp slice of p that a dp rank has."""
        if not self.sharded:
            return 0, p.numel()
        return self.shards.layout.piece(self.shards.index[p], rank)  # type: ignore[index]

    def _size(self, p: Tensor, rank: int) -> int:
        start, stop = self._range(p, rank)
        return stop - start

    def _in_column(self, batch: list[Tensor]) -> list[Tensor]:
        """The matrices whose owner has this rank's number along dp."""
        return [p for p in batch if self.owner[p].dp == self.me.dp]

    # To the owners

    def _gather(self, batch: list[Tensor], pieces: dict[Tensor, Tensor], tag: int) -> Any:
        if not self.sharded:
            return None
        parts = [
            [pieces.pop(p) for p in batch if self.owner[p].dp == rank] for rank in range(self.n_dp)
        ]
        mine = self._in_column(batch)
        sizes = [sum(self._size(p, rank) for p in mine) for rank in range(self.n_dp)]
        return self._launch(self.dp, parts, sizes, tag)

    def _whole_along_dp(
        self, batch: list[Tensor], pieces: dict[Tensor, Tensor], incoming: list[_Message | None]
    ) -> dict[Tensor, Tensor]:
        mine, message = self._in_column(batch), incoming.pop(0)
        if message is None:
            given = {p: pieces.pop(p) for p in batch}
            return {p: given[p].reshape(p.shape) for p in mine}
        parts = _split(message, [[self._size(p, rank) for p in mine] for rank in range(self.n_dp)])
        return {p: torch.cat([row[i] for row in parts]).view(p.shape) for i, p in enumerate(mine)}

    def _join(self, batch: list[Tensor], slices: dict[Tensor, Tensor], tag: int) -> dict:
        """The whole matrices that this rank owns."""
        mine = [p for p in slices if self.owner[p] == self.me]
        declared = self.shards.declared
        if self.tp is None or declared is None:
            return {p: slices[p] for p in mine}
        split = [p for p in slices if declared.along_tp(p)[0].gather_axes]
        parts = [[slices[p] for p in split if self.owner[p].tp == t] for t in range(self.n_tp)]
        joined = [p for p in split if self.owner[p] == self.me]
        sizes = [sum(p.numel() for p in joined)] * self.n_tp
        message = self._launch(self.tp, parts, sizes, tag)
        rows = _split(message, [[p.numel() for p in joined]] * self.n_tp)
        whole = {p: slices[p] for p in mine}
        for i, p in enumerate(joined):
            columns = [row[i].view(p.shape) for row in rows]
            placement, shape = declared.along_tp(p)
            whole[p] = placement.join(columns, shape)
        return whole

    # And back

    def _send_slices(self, batch: list[Tensor], results: dict, tag: int) -> _Message:
        declared = self.shards.declared

        def slice_of(p: Tensor, rank: int) -> Tensor:
            whole = results[p]
            if declared is None:
                return whole
            placement, shape = declared.along_tp(p)
            return placement.cut(whole.view(shape), {"tp": rank})

        parts = [[slice_of(p, rank) for p in results] for rank in range(self.n_tp)]
        sizes = [
            sum(p.numel() for p in self._in_column(batch) if self.owner[p].tp == t)
            for t in range(self.n_tp)
        ]
        return self._launch(self.tp, parts, sizes, tag)

    def _slices(self, batch: list[Tensor], message: _Message) -> dict:
        """The results of this rank's tp slice, of its column's matrices."""
        mine = self._in_column(batch)
        by_owner = [[p for p in mine if self.owner[p].tp == t] for t in range(self.n_tp)]
        return self._unpacked(by_owner, message, lambda p: p.numel())

    def _send_pieces(self, batch: list[Tensor], slices: dict, tag: int) -> _Message:
        mine = self._in_column(batch)
        parts = [[slices[p][slice(*self._range(p, r))] for p in mine] for r in range(self.n_dp)]
        sizes = [
            sum(self._size(p, self.me.dp) for p in batch if self.owner[p].dp == r)
            for r in range(self.n_dp)
        ]
        return self._launch(self.dp, parts, sizes, tag)

    def _pieces(self, batch: list[Tensor], message: _Message) -> Iterator:
        by_owner = [[p for p in batch if self.owner[p].dp == r] for r in range(self.n_dp)]
        yield from self._unpacked(by_owner, message, lambda p: self._size(p, self.me.dp)).items()

    def _unpacked(
        self, senders: list[list[Tensor]], message: _Message, size: Callable[[Tensor], int]
    ) -> dict[Tensor, Tensor]:
        rows = _split(message, [[size(p) for p in ps] for ps in senders])
        return {p: x for ps, row in zip(senders, rows) for p, x in zip(ps, row)}

    # Messages

    def _launch(
        self, group: Collectives | None, parts: list[list[Tensor]], sizes: list[int], tag: int
    ) -> _Message:
        """Begin to send parts[r] to rank r, and to receive sizes[r] elements from it."""
        flat = [x.reshape(-1) for part in parts for x in part]
        x = torch.cat(flat) if flat else self._like
        if group is None:
            return _Message(x, None, x)
        counts = [sum(t.numel() for t in part) for part in parts]
        out = x.new_empty(sum(sizes))
        handle = group.all_to_all(out, x, sizes, counts, async_op=True, tag=tag)
        return _Message(out, started(handle), x)


def _split(message: _Message, sizes: list[list[int]]) -> list[list[Tensor]]:
    """Wait for the message; returns the data from each rank, split into these sizes."""
    if message.handle is not None:
        message.handle.wait()
    rows = message.received.split([sum(row) for row in sizes])
    return [list(row.split(each)) for row, each in zip(rows, sizes)]


_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_SCALES = (None, "original", "match_rms_adamw")


class Muon(AdamW):
    """Muon: torch.optim.Muon's signature, and AdamW for parameters that are not hidden matrices.

    Works on parallelized models as it is, at any stage and tp, with the bits of one process.
    Parameters without a gradient are skipped.

    Args:
        params: parameters, named parameters, or groups; options up to adamw may differ per group.
        lr, weight_decay, momentum, nesterov, eps: as in torch.optim.Muon.
        ns_coefficients: (a, b, c) of every step of orthogonalize. Default: those of Polar Express.
        ns_steps: number of steps; Polar Express has up to 5.
        adjust_lr_fn: "original" (None) scales by sqrt(max(1, m / n)); "match_rms_adamw" by
            0.2 sqrt(max(m, n)), so that lr and weight_decay found for AdamW can be used.
        matrices: number of equal matrices in a parameter, along its outputs, or their heights
            relative to each other, as in (2, 1, 1).
        experts: parameters are stacks [E, M, N], of which each matrix has its own O.
        transposed: weights are [inputs, outputs], as in transformers' Conv1D.
        adamw: a mapping: options of groups with adamw=True, see fastpar.AdamW; by default
            lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1. In a group: whether AdamW
            steps it.
        master_weights, max_grad_norm: as in fastpar.AdamW; the norm is that of all groups.
    Attributes:
        grad_norm, grad_scale, found_inf, skipped: as in fastpar.AdamW; with a loss scale, step()
            waits on the host to know whether it overflowed.
    Gradients: a matrix whose gradient is zero only decays. One with a non-finite gradient becomes
        nan as a whole, as in torch.optim.Muon; others do not, unless max_grad_norm clips by the
        common norm. With grad_scale set (even to 1.0) all ranks skip such a step.
    Ranks: all ranks of the model's mesh call step().
    State: momentum_buffer as in torch.optim.Muon; AdamW's for its groups; a master for 16-bit
        parameters. State dicts load both ways if torch has the options.
    Raises:
        ValueError: options outside their range; a parameter that is no matrix, or not of the
            group's number of matrices; 16-bit parameters without master weights; another
            optimizer's state.
        RuntimeError: sparse gradients; a CUDA graph captures the step.
    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; scales: Liu et al. 2025,
        arXiv 2502.16982.
    """

    _not_in_groups = ("master_weights", "max_grad_norm")
    _attributes = (*AdamW._attributes, "_adamw", "_own")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | None = None,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        matrices: int | tuple[int, ...] = 1,
        transposed: bool = False,
        experts: bool = False,
        adamw: Mapping[str, Any] | None = None,
        master_weights: bool | str = False,
        max_grad_norm: float | None = None,
    ) -> None:
        self._adamw = {**_ADAMW, **(adamw or {})}
        self._own = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn, "matrices": matrices, "transposed": transposed,
            "experts": experts, "adamw": False,
        }  # fmt: skip
        super().__init__(params, master_weights=master_weights, max_grad_norm=max_grad_norm)
        self.defaults |= self._own  # for groups of a loaded state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the default options of its kind."""
        kind = self._adamw if param_group.get("adamw") else {}
        super().add_param_group({**self._own, **kind, **param_group})

    def _check_options(self, group: dict[str, Any], caller: str) -> None:
        if group["adamw"]:
            return super()._check_options(group, caller)
        ranges = {
            "lr": (group["lr"], 0.0, math.inf),
            "weight_decay": (group["weight_decay"], 0.0, math.inf),
            "momentum": (group["momentum"], 0.0, 1.0),
            "eps": (group["eps"], 0.0, math.inf),
        }
        check_ranges(caller, ranges)
        if group["adjust_lr_fn"] not in _SCALES:
            raise ValueError(
                f"{caller}: expected adjust_lr_fn to be None, 'original' or 'match_rms_adamw', got "
                f"adjust_lr_fn={group['adjust_lr_fn']!r}; None is 'original'"
            )
        most = 99 if group["ns_coefficients"] else len(POLAR_EXPRESS)
        if not 1 <= group["ns_steps"] <= most:
            raise ValueError(
                f"{caller}: expected 1 <= ns_steps <= {most}, got ns_steps={group['ns_steps']}; 5 "
                "is usual"
            )

    def _check_parameter(self, p: Tensor, group: dict[str, Any]) -> None:
        super()._check_parameter(p, group)
        if group["adamw"]:
            return
        shape = whole_shape(p)
        position = next(i for i, q in enumerate(group["params"]) if q is p)
        names = group.get("param_names")
        name = f"'{names[position]}'" if names else f"parameter {position} of its group"
        if len(shape) != 2 + group["experts"] or (group["experts"] and group["transposed"]):
            raise ValueError(
                f"Muon: expected matrices [M, N], got {name} of shape={list(shape)}; put it into a "
                "group with adamw=True, or use fastpar.muon_groups(model)"
            )
        heights = _heights(group)
        if min(heights) < 1 or shape[int(group["transposed"])] % sum(heights):
            raise ValueError(
                f"Muon: expected matrices to divide the outputs of {name} of shape={list(shape)}, "
                f"got matrices={group['matrices']} transposed={group['transposed']}; correct the "
                "option of this group"
            )

    # The step

    def _check_capture(self) -> None:
        first = next((p for group in self.param_groups for p in group["params"]), None)
        if first is not None and capturing(first.device):
            raise RuntimeError(
                "Muon.step: cannot be captured in a CUDA graph; step outside of the capture"
            )

    steps_on_host = False

    def _update(
        self, rows: Rows | list[Row], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        groups = self.param_groups
        super()._update([row for row in rows if groups[row.group]["adamw"]], factor, found_inf)
        mine = [row for row in rows if not groups[row.group]["adamw"]]
        if not mine or (found_inf is not None and found_inf.item()):
            return
        together: dict[tuple[Engine | None, torch.dtype, str], list[Row]] = {}
        for row in mine:
            key = row.engine, _dtype_of_products(row.param), _key_of(row.param)
            together.setdefault(key, []).append(row)
        for (engine, dtype, travel), those in together.items():
            by_param = {row.param: row for row in those}
            pieces: dict[Tensor, Tensor] = {}
            for some in _some(those, lambda row: row.piece):
                pieces |= self._momenta(some, factor)
            results: Iterable[tuple[Tensor, Tensor]]
            if engine is None:
                results = self._results_alone(pieces)
            else:
                results = self._owners(engine, dtype, travel).run(pieces, self._results)
            for few in _some(results, lambda result: result[1]):
                self._apply([(by_param[p], update) for p, update in few])

    def _momenta(self, rows: list[Row], factor: Tensor | None) -> dict[Tensor, Tensor]:
        """Update the momenta; returns the inputs of orthogonalize, in the dtype of products."""
        alike: dict[tuple[int, torch.dtype], list[Row]] = {}
        for row in rows:
            state, p = self.state[row.param], row.piece
            if "momentum_buffer" not in state:
                wide = torch.promote_types(p.dtype, torch.float32)
                state["momentum_buffer"] = torch.zeros_like(p, dtype=wide, requires_grad=False)
            add_master(state, p, self.master_weights)
            alike.setdefault((row.group, p.dtype), []).append(row)
        found: dict[Tensor, Tensor] = {}
        for (number, _), these in alike.items():
            group, p = self.param_groups[number], these[0].piece
            beta, wide = float(group["momentum"]), torch.promote_types(p.dtype, torch.float32)
            grads: Any = [row.grad.to(wide) for row in these]
            if factor is not None:
                grads = torch._foreach_mul(grads, factor.to(p.device))
            grads = torch._foreach_mul(grads, beta - 1.0 if group["maximize"] else 1.0 - beta)
            buffers = [self.state[row.param]["momentum_buffer"] for row in these]
            # See "Single roundings" above.
            torch._foreach_mul_(buffers, beta)
            torch._foreach_add_(buffers, grads)
            moved: Any = buffers
            if group["nesterov"]:
                moved = torch._foreach_mul(buffers, beta)
                torch._foreach_add_(moved, grads)
            for row, x in zip(these, moved):
                found[row.param] = x.to(_dtype_of_products(p)).reshape(-1)
        return found

    def _results_alone(self, pieces: dict[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Of parameters without an engine, some at a time."""
        for some in _some(list(pieces), lambda p: p):
            yield from self._results({p: pieces.pop(p) for p in some}).items()

    def _results(self, wholes: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The orthogonal factors of whole parameters."""
        alike: dict[tuple, list[tuple[Tensor, Tensor]]] = {}  # by the options of the steps
        for p, whole in wholes.items():
            group, x = self._group_of(p), whole.view(_matrix_shape(p))
            x = x.t() if group["transposed"] else x
            given, n = group["ns_coefficients"], group["ns_steps"]
            steps = (tuple(given),) * n if given else POLAR_EXPRESS[:n]
            matrices = [(p, part) for part in x.split(self._rows(p))]
            alike.setdefault((steps, group["eps"]), []).extend(matrices)
        factors: dict[Tensor, list[Tensor]] = {p: [] for p in wholes}
        for (steps, eps), these in alike.items():
            xs = [x for _, x in these]
            made = orthogonalize_each(xs, coefficients=steps, eps=eps, dtype=xs[0].dtype)
            for (p, _), factor in zip(these, made):
                factors[p].append(factor)
        return {p: self._joined(p, parts) for p, parts in factors.items()}

    def _joined(self, p: Tensor, parts: list[Tensor]) -> Tensor:
        """A parameter's result from its matrices' factors."""
        group = self._group_of(p)
        first, columns = parts[0].shape
        for i, part in enumerate(parts):  # _apply() scales all as the first
            if len(part) != first:
                factor = _lr_scale(group, len(part), columns) / _lr_scale(group, first, columns)
                parts[i] = part * factor
        out = torch.cat(parts) if len(parts) > 1 else parts[0]
        return (out.t() if group["transposed"] else out).contiguous()

    def _apply(self, results: list[tuple[Row, Tensor]]) -> None:
        """Step parameters by their results."""
        alike: dict[tuple[int, torch.dtype], list[tuple[Row, Tensor, Tensor, float]]] = {}
        for row, update in results:
            group, p = self.param_groups[row.group], row.piece
            values = values_of(p, self.state[row.param])
            columns = _matrix_shape(row.param)[1 - int(group["transposed"])]
            rate = float(group["lr"]) * _lr_scale(group, self._rows(row.param)[0], columns)
            update = update.view(p.shape).to(values.dtype)
            alike.setdefault((row.group, values.dtype), []).append((row, values, update, rate))
        for (number, _), these in alike.items():
            group, all_values = self.param_groups[number], [x for _, x, _, _ in these]
            steps: Any = torch._foreach_mul(
                [update for _, _, update, _ in these], [rate for *_, rate in these]
            )
            if decay := float(group["lr"]) * float(group["weight_decay"]):
                torch._foreach_mul_(all_values, 1.0 - decay)
            torch._foreach_sub_(all_values, steps)
            for row, x, *_ in these:
                store_values(row.piece, self.state[row.param], x)

    def _owners(self, engine: Engine, dtype: torch.dtype, travel: str) -> Owners:
        """Owners of all matrices of an engine with products of a dtype, made at the first step.

        travel: the key of their buckets; other keys may have other ranks.
        """
        known = self.__dict__.setdefault("_known_owners", {})
        params = [
            p
            for group in self.param_groups
            if not group["adamw"]
            for p in group["params"]
            if engine_of_parameter(p) is engine and _dtype_of_products(p) == dtype
            if _key_of(p) == travel
        ]
        owners = known.get((engine, dtype, travel))
        if owners is None or list(map(id, owners.owner)) != list(map(id, params)):
            owners = Owners(engine, params, [self._cost(p) for p in params])
            known[engine, dtype, travel] = owners
        return owners

    def _cost(self, p: Tensor) -> float:
        """FLOPs of orthogonalize per step."""
        columns, cost = _matrix_shape(p)[1 - int(self._group_of(p)["transposed"])], 0.0
        for rows in self._rows(p):
            short, long = sorted((rows, columns))
            cost += 4 * short * short * long + 2 * short**3
        return cost

    def _rows(self, p: Tensor) -> list[int]:
        """Rows of the matrices that are one below another in _matrix_shape()."""
        group = self._group_of(p)
        heights = _heights(group) * (len(p) if p.dim() == 3 else 1)
        unit = _matrix_shape(p)[int(group["transposed"])] // sum(heights)
        return [unit * height for height in heights]

    # State

    def entry_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """The whole shape of every entry that a parameter's state may have."""
        own = {} if self._group_of(p)["adamw"] else {"momentum_buffer": whole_shape(p)}
        return super().entry_shapes(p) | own

    def _required(self, p: Tensor, group: dict[str, Any]) -> list[list[tuple[str, ...]]]:
        return super()._required(p, group) if group["adamw"] else [[("momentum_buffer",)]]

    def _convert_moments(
        self, saved: dict[str, Any], p: Tensor, group: dict[str, Any], *, copy: bool
    ) -> dict[str, Any]:
        if group["adamw"]:
            return super()._convert_moments(saved, p, group, copy=copy)
        wide = torch.promote_types(p.dtype, torch.float32)
        buffer = torch.empty_like(p, dtype=wide, requires_grad=False)
        return {"momentum_buffer": buffer.copy_(saved["momentum_buffer"])}


def _some(items: Iterable[T], of: Callable[[T], Tensor]) -> Iterator[list[T]]:
    """The items in lists: those that a GPU works on together, on a CPU one by one."""
    some: list[T] = []
    n = 0
    for item in items:
        some.append(item)
        n += of(item).numel()
        if n >= TOGETHER or not of(item).is_cuda:
            yield some
            some, n = [], 0
    if some:
        yield some


def _heights(group: dict[str, Any]) -> list[int]:
    """Of the matrices of a weight, relative to each other."""
    matrices = group["matrices"]
    return [1] * matrices if isinstance(matrices, int) else [*matrices]


def _lr_scale(group: dict[str, Any], m: int, n: int) -> float:
    """The factor of the learning rate for a matrix [M, N]."""
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1.0, m / n))


def _dtype_of_products(p: Tensor) -> torch.dtype:
    wide = torch.promote_types(p.dtype, torch.float32)
    return torch.bfloat16 if p.is_cuda and wide == torch.float32 else wide


def _key_of(p: Tensor) -> str:
    engine = engine_of_parameter(p)
    return "" if engine is None else engine.shards.bucket_of(p).spec.key


def _matrix_shape(p: Tensor) -> torch.Size:
    """The shape of a parameter's matrices, one below another; whole along tp, local along ep."""
    engine, shape = engine_of_parameter(p), p.shape
    if engine is not None and engine.declared is not None:
        shape = engine.declared.along_tp(p)[1]
    return shape if len(shape) == 2 else torch.Size([shape[0] * shape[1], shape[2]])


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """A model's trained parameters as groups for fastpar.Muon.

    Muon steps matrices of linear layers inside a list of blocks, each expert's separately; layers
    with three times as many outputs as inputs are q, k and v, and fastpar.GPT says which matrices
    its layers hold (also gate and up, and heads of keys that are fewer). AdamW steps all others,
    routers included: tensors of two and more dimensions with weight decay, the rest without.

    Raises:
        ValueError: a model without linear layers in a list of blocks.
    """
    names = parameter_names(model)
    kinds: dict[nn.Parameter, tuple[int | tuple[int, ...], bool]] = {}
    embedded = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight not in names or weight in embedded or weight.dim() not in (2, 3):
            continue
        if isinstance(module, Router):
            continue
        if not any(part.isdecimal() for part in name.split(".")):
            continue
        transposed = is_conv1d(module)
        outputs, inputs = whole_shape(weight)[-2:][:: -1 if transposed else 1]
        fused = outputs == 3 * inputs and weight.dim() == 2
        heights = getattr(module, "matrices", (1,) * (3 if fused else 1))
        equal = len(set(heights)) == 1
        kinds[weight] = (len(heights) if equal else heights), transposed
    trained = [p for p in names if p.requires_grad]
    engine = engine_of_parameter(trained[0]) if trained else None
    in_stage = engine is not None and engine.shards.stages is not None  # may have no layers
    if not in_stage and not any(p in kinds for p in trained):
        raise ValueError(
            f"muon_groups: {type(model).__name__} has no linear layers in a list of blocks; make "
            "the groups yourself, with adamw=True for parameters that are not hidden matrices"
        )
    groups: dict[Any, dict[str, Any]] = {}
    for p in trained:
        options: dict[str, Any] = {"adamw": True}
        if p in kinds:
            options = {"matrices": kinds[p][0], "transposed": kinds[p][1]}
            options |= {"experts": True} if p.dim() == 3 else {}
        elif p.dim() < 2:
            options["weight_decay"] = 0.0
        groups.setdefault(tuple(options.items()), {"params": [], **options})["params"].append(p)
    return list(groups.values())
