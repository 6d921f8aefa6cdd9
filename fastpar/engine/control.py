"""The control exchange: one small all-gather per step, before the optimizer's update; also numbers
and texts exchanged outside of a step.

    | hashes | backwards | cleared | tokens | norm bins | used parameters, a bit each | values |

These are int64 words of each rank, gathered by all, so that every rank sums the same numbers in the
same order. On a GPU the words stay on the device; what the host checks is read a step later.

[Note: begin] At stage 3 a pass gathers parameters, while the exchange uses another group: ranks
with different numbers of micro-batches would wait for each other forever. So CPU ranks exchange
what they begin, a step, a pass of the model or a state_dict(), and report the first difference at
once. On a GPU that would make the host wait; there the watchdog names the rank that is late.

A rank without a backward in a step counts as 0 in the mean over all ranks, as a rank that has
joined DDP's Join does. Nobody announced it, so each rank warns.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import AXES, Mesh, gather_objects
from fastpar.comm.recorder import extended_hash
from fastpar.doctor.doctor import share
from fastpar.kernels.global_norm import NORM_WORDS

_BITS = 62
MOST_LATE = 4  # steps whose words have not been compared yet
BEGINS = (
    "a step", "a forward", "a forward without gradients", "a backward", "state_dict() or gathered()"
)  # fmt: skip
_HEAD = 5  # hashes of two kinds of collectives, backwards, hash of cleared gradients, tokens


def count_words(n_params: int) -> int:
    """Words per rank of a step's exchange, without values."""
    return _HEAD + NORM_WORDS + -(-n_params // _BITS)


class Tally(Protocol):
    """Numbers that a model adds to each exchange: fp64, equally many on every rank."""

    def take(self, device: torch.device) -> Tensor:
        """This rank's numbers of the step; the next step begins."""

    def give(self, total: Tensor, rows: Tensor) -> None:
        """Receive a step's sums over the ranks, and every rank's numbers."""

    def forget(self) -> None:
        """Drop the numbers of this step: its gradients were zeroed."""


class Control:
    """Makes, exchanges and reads the words of one engine.

    Args:
        group: all ranks of the mesh, None if there is one.
        n_params: of the engine; with a pipeline, of the whole model.
        copy_ranks: the ranks that hold one replica of the model with this one, over which the norm
            is summed. With a pipeline: the ranks of one stage, counted from its first.
        stage, stages: the number of this rank's pipeline stage, and the count of stages.
    Attributes:
        contributed: fp64 [k], the sums over the ranks of values contributed to the last step.
        token_scale: fp32 [], divisor of the gradients, None if tokens are not counted.
        tally: numbers that the model adds, None without.
        captured: a step is captured in a CUDA graph: the host compares nothing.
        sent: int64, what this rank said last, without values.
    """

    captured = False

    def __init__(
        self,
        group: Collectives | None,
        n_params: int,
        copy_ranks: Sequence[int],
        device: torch.device,
        stage: int = 0,
        stages: int = 1,
    ) -> None:
        self.group, self._n_params, self._device = group, n_params, device
        self._ranks = slice(copy_ranks[0], copy_ranks[-1] + 1)
        self._stages, n_ranks = stages, 1 if group is None else group.world_size // stages
        self._peers = range(stage * n_ranks, (stage + 1) * n_ranks)  # have the same parameters
        self._values: list[Tensor] = []
        self._tokens: Tensor | int | None = None
        self._doubt = ""  # why the count of tokens may be wrong, for the error
        self._rows: Tensor | None = None
        self._nothing = torch.zeros(0, dtype=torch.float64, device=device)
        self._late: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._words: list[int] = []  # those of sent
        self.sent: Any = None
        self.contributed: Tensor | None = None
        self.token_scale: Tensor | None = None
        self.tally: Tally | None = None

    def contribute(self, values: Tensor) -> None:
        """Add values to this step's exchange; several calls are concatenated."""
        self._values.append(values.detach().reshape(-1).to(self._device, torch.float64))

    def count_tokens(self, n: int | Tensor) -> None:
        """Add to the valid tokens of this rank in this step."""
        if self._tokens is None:
            self._doubt = ""
        self._tokens = n if self._tokens is None else self._tokens + n

    @property
    def counts_tokens(self) -> bool:
        """Whether the step will divide gradients by tokens."""
        return self._tokens is not None

    @property
    def has_values(self) -> bool:
        """Whether tokens or values were added in this step."""
        return self._tokens is not None or bool(self._values)

    def forget(self, *, early: bool) -> None:
        """Drop tokens and values, as gradients were zeroed; early: before a backward."""
        lost = early and self._tokens is not None
        self._values, self._tokens, self._rows = [], None, None
        if self.tally is not None:
            self.tally.forget()
        self._doubt = "zero_grad() dropped the count" if lost else ""

    def doubt(self) -> None:
        """Note that some gradients were zeroed, so the count of tokens may be wrong."""
        if self._tokens is not None:
            self._doubt = "zero_grad() of some parameters came after count_tokens()"

    @property
    def has_nothing_to_say(self) -> bool:
        """Whether there is one rank, without tokens or values."""
        alone = self.group is None and self.tally is None
        return alone and not (self.has_values or self._doubt)

    def skip(self) -> None:
        """In the place of an exchange that would say nothing."""
        self.token_scale, self.contributed = None, self._nothing

    def exchange(
        self,
        bins: Tensor | None,
        *,
        hashes: Sequence[int],
        backwards: int,
        used: Sequence[bool],
        cleared: Sequence[int] = (),
        second: bool = False,
    ) -> Tensor | None:
        """Exchange everything; returns the sum of all norm bins. Ranks: all, once per step.

        Args:
            cleared: parameters whose gradients were set to None by hand, in order.
            second: for one more optimizer in the same step: values and tokens belong to the next.
        """
        if self._doubt:
            doubt, self._doubt = self._doubt, ""
            raise RuntimeError(
                f"Engine: the token count does not match the gradients ({doubt}); call zero_grad() "
                "for all parameters first, then count_tokens(), then backward()"
            )
        values, tokens, tally = self._values, self._tokens, self.tally
        if second:
            values, tokens, tally = [], None, None
        else:
            self._values, self._tokens, self.token_scale = [], None, None
        flags = [
            sum([1 << bit for bit, u in enumerate(used[i : i + _BITS]) if u])
            for i in range(0, self._n_params, _BITS)
        ]
        words = [
            *hashes,
            backwards,
            functools.reduce(extended_hash, cleared, 0),
            -1 if tokens is None or isinstance(tokens, Tensor) else int(tokens),
            *flags,
        ]
        if words != self._words:  # else a graph finds them at their address
            host = torch.tensor(words, dtype=torch.int64, device="cpu")
            if self._device.type == "cuda":
                host = host.pin_memory().to(self._device, non_blocking=True)
            self._words, self.sent = words, host
        sent = self.sent
        parts = [sent[:_HEAD]]
        if isinstance(tokens, Tensor):
            parts = [sent[: _HEAD - 1], tokens.reshape(1).to(self._device, torch.int64)]
        if tally is not None:
            tallied = tally.take(self._device)
            values.append(tallied)
        zero = bins if bins is not None else sent.new_zeros(NORM_WORDS)
        summed = torch.cat(values) if values else sent.new_zeros(0).double()
        mine = torch.cat([*parts, zero, sent[_HEAD:], summed.view(torch.int64)])
        if self.group is None:
            rows = mine.view(1, -1)
        else:
            rows = self.group.gathered(mine)
            if not self.captured:
                self._check(self._of_peers(rows)[:, :_HEAD])
        self._rows = rows
        start = count_words(self._n_params)
        if not second:
            given = rows[:, start:].contiguous().view(torch.float64)
            total = _sum_rows(given)
            if tally is not None:
                n = tallied.numel()
                tally.give(total[-n:], given[:, -n:])
                total = total[:-n]
            self.contributed = total
        if tokens is not None:
            n_tokens = rows[:, _HEAD - 1].clamp(min=0).sum()
            self.token_scale = n_tokens.clamp(min=1).float() / rows.shape[0]
        if bins is None:
            return None
        by_stage = rows.unflatten(0, (self._stages, -1))
        return by_stage[:, self._ranks, _HEAD : _HEAD + NORM_WORDS].sum((0, 1))

    def _of_peers(self, rows: Tensor) -> Tensor:
        return rows[self._peers.start : self._peers.stop]

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a small vector over the ranks, outside of a step. Ranks: all.

        Raises:
            ValueError: a dtype other than fp32 and fp64.
        """
        if values.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"all_reduce_scalars: expected fp32 or fp64, got dtype={values.dtype}; "
                "pack the values with torch.tensor([...], dtype=torch.float64)"
            )
        mine = values.detach()
        return mine.clone() if self.group is None else _sum_rows(self.group.gathered(mine))

    def begin(self, what: str, n_micro_batches: int) -> None:
        """Check that all ranks begin the same; see [Note: begin]. Ranks: all.

        Args:
            what: one of BEGINS; n_micro_batches: since the last step, for the message.
        """
        group = self.group
        if (
            group is None
            or self.captured
            or self._stages > 1
            or group.transport not in ("shm", "gloo")
            or group.device.type != "cpu"
        ):
            return
        kind = BEGINS.index(what)
        said = group.gathered(
            torch.tensor([kind, n_micro_batches], dtype=torch.int64, device="cpu")
        ).tolist()
        for rank, (theirs, count) in enumerate(said):
            if theirs != said[0][0]:
                raise RuntimeError(
                    f"Engine: ranks differ: rank {rank} begins {BEGINS[theirs]} after {count} "
                    f"micro-batches, rank 0 {BEGINS[said[0][0]]} after {said[0][1]}; give every "
                    "rank the same number of micro-batches, or none, and evaluate and save on "
                    "every rank"
                )

    def used_anywhere(self, parameter: int) -> bool:
        """Whether any rank had a gradient for it in this step. Waits for the device."""
        assert self._rows is not None
        column = _HEAD + NORM_WORDS + parameter // _BITS
        words = self._of_peers(self._rows)[:, column].tolist()
        return any(word >> parameter % _BITS & 1 for word in words)

    def _check(self, heads: Tensor) -> None:
        """Raise if the ranks are out of step: at once, on a GPU when the words have arrived.

        The host runs ahead of a GPU, by MOST_LATE steps at most.
        """
        first = self._peers.start
        if heads.device.type != "cuda":
            _compare(heads, first)
            return
        if len(self._late) == MOST_LATE:
            self._late[0][1].synchronize()
        while self._late and self._late[0][1].query():
            _compare(self._late.popleft()[0], first)
        self._late.append(_copied(heads))


def _copied(heads: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """(the words on the host, an event of their arrival)."""
    host = torch.empty(heads.shape, dtype=heads.dtype, pin_memory=True, device="cpu")
    host.copy_(heads, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def _compare(heads: Tensor, first_rank: int) -> None:
    rows = heads.tolist()
    busy = [(rank, row) for rank, row in enumerate(rows, first_rank) if row[2]]
    for rank, row in busy:
        first, expected = busy[0]
        if row[2] != expected[2]:
            raise RuntimeError(
                f"Engine: ranks differ: {row[2]} backward passes on rank {rank}, {expected[2]} on "
                f"rank {first}; give every rank the same number of micro-batches, or none"
            )
        if row[:2] != expected[:2]:
            raise RuntimeError(
                f"Engine: ranks {first} and {rank} launched different collectives, as they ran "
                "different parts of the model; restart from a checkpoint"
            )
    # A rank that counted 0 tokens has said so.
    idle = [rank for rank, row in enumerate(rows, first_rank) if not row[2] and row[4]]
    if busy and idle:
        many, one = len(idle) > 1, idle[0]
        warnings.warn(
            f"Engine: {f'ranks {idle}' if many else f'rank {one}'} ran no backward before a step, "
            f"others did; {'they count' if many else 'it counts'} as 0 in the mean of the "
            f"gradients over all {len(rows)} ranks; give every rank a backward, or count tokens "
            "(engine.count_tokens(0) on a rank without any)",
            stacklevel=2,
        )
    for rank, row in enumerate(rows, first_rank):
        if row[3] != rows[0][3]:
            raise RuntimeError(
                f"Engine: ranks {first_rank} and {rank} set different gradients to None between "
                "backward and step; set the same on every rank, or none where a rank has no batch"
            )
    if len({row[4] < 0 for row in rows}) > 1:
        rank = next(r for r, row in enumerate(rows, first_rank) if row[4] < 0)
        raise RuntimeError(
            f"Engine: rank {rank} did not call count_tokens(), others did; call it on every rank, "
            "with 0 on a rank without tokens"
        )


def _sum_rows(rows: Tensor) -> Tensor:
    """The sum over the ranks: in rank order on a CPU, by one kernel with equal bits on a GPU."""
    return functools.reduce(torch.add, rows) if rows.device.type == "cpu" else rows.sum(0)


# Outside of a step


def prove_together(mesh: Mesh) -> None:
    """Make all ranks run the same kernels: one GPU of each kind proves for all (doctor/).

    Ranks: all of all replicas.
    """
    if mesh.device.type == "cuda" and mesh.world_size * mesh.replicas > 1:
        kinds = gather_objects(torch.cuda.get_device_name(mesh.device))
        store = dist.distributed_c10d._get_default_store()
        share(dist.PrefixStore(f"proofs {mesh.start}", store), kinds)


def gather_numbers(engine: Any, mine: float) -> list[float]:
    """The numbers of all ranks, in rank order, on every rank; engine: None on one rank. Ranks:
    all."""
    if engine is None:
        return [mine]
    mesh = engine.mesh
    values = torch.zeros(mesh.world_size, dtype=torch.float64, device=mesh.device)
    values[mesh.rank] = mine
    return engine.all_reduce_scalars(values).tolist()


def broadcast_text(engine: Any, text: str) -> str:
    """The text of rank 0, on every rank. Ranks: all."""
    return _texts(engine, text)[0]


def gather_errors(engine: Any, mine: str | None) -> dict[int, str]:
    """Rank -> error, of the ranks that have one. Ranks: all.

    Wire: 8 bytes per rank; the texts if there is an error.
    """
    if not any(gather_numbers(engine, float(mine is not None))):
        return {}
    return {rank: text for rank, text in enumerate(_texts(engine, mine or "")) if text}


def _texts(engine: Any, mine: str) -> list[str]:
    alone = engine is None or engine.mesh.world_size == 1
    return [mine] if alone else gather_objects(mine, engine.mesh.group(*AXES))
