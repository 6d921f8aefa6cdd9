"""What every rank tells all others: the one small exchange of a step, before the optimizer's
update, and numbers and texts outside of a step.

    | hashes | backwards | cleared | tokens | norm bins | used parameters, a bit each | values |

[Note: what begins] At stage 3 a forward gathers parameters, while the exchange waits for another
group: ranks with different numbers of micro-batches would wait for each other. So between CPU ranks
each says what it begins, a step or a pass of the model, and the first difference is reported at
once. On a GPU that would make the host wait; there the watchdog names who is late.

int64 words of each rank, gathered by all, so that every rank sums the same numbers in the same
order. On a GPU the words stay on the device; what the host checks is read a step later, when it is
there anyway.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh, gather_objects
from fastpar.comm.recorder import extended_hash
from fastpar.doctor.doctor import share
from fastpar.kernels.global_norm import NORM_WORDS

_BITS = 62
_TEXT_BYTES = 2048
MOST_LATE = 4  # steps whose words have not been compared
BEGINS = ("a step", "a forward", "a forward without gradients")
_HEAD = 5  # hashes of two kinds of collectives, backwards, hash of cleared gradients, tokens


def count_words(n_params: int) -> int:
    """What a rank says in a step's exchange, without values, in words."""
    return _HEAD + NORM_WORDS + -(-n_params // _BITS)


class Tally(Protocol):
    """Numbers of a model, which nobody has to contribute: fp64, as many on every rank."""

    def take(self, device: torch.device) -> Tensor:
        """This rank's of the step; the next step begins."""

    def give(self, total: Tensor, rows: Tensor) -> None:
        """The sums over the ranks, and those of each, of a step, in its exchange."""

    def forget(self) -> None:
        """The gradients of this step were zeroed."""


class Control:
    """Makes, exchanges and reads the words of one engine.

    Args:
        group: all ranks of the mesh, None if there is one.
        n_params: of the engine; under a pipeline of the whole model.
        copy_ranks: the ranks that have one copy of the model with this one; the norm is theirs.
            Under a pipeline these are the ranks of one stage, counted from its first.
        stage, stages: the number of this rank's pipeline stage, and how many there are.
    Attributes:
        contributed: fp64 [k], sum over the ranks of what they contributed to the last step.
        token_scale: fp32 [], by which gradients are divided, None if nobody counts tokens.
        tally: numbers of a model itself that are summed with the others, None without.
    """

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
        self._doubt = ""  # what is wrong with the tokens, for a person
        self._rows: Tensor | None = None
        self._late: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self.contributed: Tensor | None = None
        self.token_scale: Tensor | None = None
        self.tally: Tally | None = None

    def contribute(self, values: Tensor) -> None:
        """Add values to this step's exchange; several calls are concatenated."""
        self._values.append(values.detach().reshape(-1).to(self._device, torch.float64))

    def count_tokens(self, n: int | Tensor) -> None:
        """Add to this rank's valid tokens of this step."""
        if self._tokens is None:
            self._doubt = ""
        self._tokens = n if self._tokens is None else self._tokens + n

    @property
    def told(self) -> bool:
        """Whether this step's exchange has something to tell so far."""
        return self._tokens is not None or bool(self._values)

    def forget(self, *, early: bool) -> None:
        """Gradients were zeroed, and what was told of them with them; early: before a backward."""
        lost = early and self._tokens is not None
        self._values, self._tokens = [], None
        if self.tally is not None:
            self.tally.forget()
        self._doubt = "none after zero_grad(), which dropped what was counted" if lost else ""

    def doubt(self) -> None:
        """Some gradients were zeroed: what was counted is not the count of all of them."""
        if self._tokens is not None:
            self._doubt = "zero_grad() of some parameters only, after it"

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
        """Tell and hear everything; the bins of all shards together. Ranks: all, once per step.

        cleared: parameters whose gradients were set to None by hand, in order.
        second: for one more optimizer: what is told and counted belongs to the next step.
        """
        if self._doubt:
            doubt, self._doubt = self._doubt, ""
            raise RuntimeError(
                f"Engine: expected count_tokens() of what the gradients are sums over, got {doubt};"
                " call zero_grad() for all parameters first, then count_tokens(), then backward()"
            )
        values, tokens, tally = self._values, self._tokens, self.tally
        if second:
            values, tokens, tally = [], None, None
        else:
            self._values, self._tokens, self.token_scale = [], None, None
        counted = tokens is not None
        unknown = isinstance(tokens, Tensor) or not counted
        words = [
            *hashes,
            backwards,
            functools.reduce(extended_hash, cleared, 0),
            -1 if unknown else 0,
        ]
        if not unknown:
            words[-1] = int(tokens)  # type: ignore[arg-type]
        flags = [
            sum(1 << bit for bit, u in enumerate(used[i : i + _BITS]) if u)
            for i in range(0, self._n_params, _BITS)
        ]
        host = torch.tensor([*words, *flags], dtype=torch.int64, device="cpu")
        if self._device.type == "cuda":
            host = host.pin_memory().to(self._device, non_blocking=True)
        parts = [host[:_HEAD]]
        if isinstance(tokens, Tensor):
            parts = [host[: _HEAD - 1], tokens.reshape(1).to(self._device, torch.int64)]
        if tally is not None:
            tallied = tally.take(self._device)
            values.append(tallied)
        zero = bins if bins is not None else host.new_zeros(NORM_WORDS)
        summed = torch.cat(values) if values else host.new_zeros(0).double()
        mine = torch.cat([*parts, zero, host[_HEAD:], summed.view(torch.int64)])
        if self.group is None:
            rows = mine.view(1, -1)
        else:
            rows = self.group.gathered(mine)
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
        if counted:
            n_tokens = rows[:, _HEAD - 1].clamp(min=0).sum()
            self.token_scale = n_tokens.clamp(min=1).float() / rows.shape[0]
        if bins is None:
            return None
        by_stage = rows.unflatten(0, (self._stages, -1))
        return by_stage[:, self._ranks, _HEAD : _HEAD + NORM_WORDS].sum((0, 1))

    def _of_peers(self, rows: Tensor) -> Tensor:
        return rows[self._peers.start : self._peers.stop]

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a small vector over the ranks, apart from a step. Ranks: all.

        Raises:
            ValueError: another dtype than fp32 and fp64.
        """
        if values.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"all_reduce_scalars: expected fp32 or fp64, got dtype={values.dtype}; "
                "pack the values with torch.tensor([...], dtype=torch.float64)"
            )
        mine = values.detach()
        return mine.clone() if self.group is None else _sum_rows(self.group.gathered(mine))

    def begin(self, what: str, n_micro_batches: int) -> None:
        """Tell the others what begins; see [Note: what begins]. Ranks: all.

        Args:
            what: one of BEGINS; n_micro_batches: since the last step, for the message.
        """
        group = self.group
        if (
            group is None
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
                    f"Engine: expected every rank to begin the same, got {BEGINS[theirs]} after "
                    f"{count} micro-batches on rank {rank} where rank 0 begins "
                    f"{BEGINS[said[0][0]]} after {said[0][1]}; give every rank the same number of "
                    "micro-batches, or none, and evaluate on every rank"
                )

    def used_anywhere(self, parameter: int) -> bool:
        """Whether any rank had a gradient for it in this step. Waits for the device."""
        assert self._rows is not None
        column = _HEAD + NORM_WORDS + parameter // _BITS
        words = self._of_peers(self._rows)[:, column].tolist()
        return any(word >> parameter % _BITS & 1 for word in words)

    def _check(self, heads: Tensor) -> None:
        """Raise if the ranks were out of step: at once, or on a GPU when the words are there.

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
    """The words on the host, and when they are there."""
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
                f"Engine: expected as many backward passes on every rank, got {row[2]} on rank "
                f"{rank} where rank {first} has {expected[2]}; give every rank the same number of "
                "micro-batches, or none"
            )
        if row[:2] != expected[:2]:
            raise RuntimeError(
                "Engine: expected the same collectives in the same order on every rank, got others "
                f"on rank {rank} than on rank {first}; the ranks ran different parts of the model: "
                "restart from a checkpoint"
            )
    for rank, row in enumerate(rows, first_rank):
        if row[3] != rows[0][3]:
            raise RuntimeError(
                "Engine: expected the same gradients set to None on every rank between backward "
                f"and step, got others on rank {rank} than on rank {first_rank}; do it on every "
                "rank, or on none where a rank has no batch"
            )
    if len({row[4] < 0 for row in rows}) > 1:
        rank = next(r for r, row in enumerate(rows, first_rank) if row[4] < 0)
        raise RuntimeError(
            f"Engine: expected count_tokens() on every rank or on none, got none on rank {rank}; "
            "a rank without tokens counts 0"
        )


def _sum_rows(rows: Tensor) -> Tensor:
    """The sum over the ranks: in rank order on a CPU, by one kernel, equal on all, on a GPU."""
    return functools.reduce(torch.add, rows) if rows.device.type == "cpu" else rows.sum(0)


# Outside of a step


def prove_together(mesh: Mesh) -> None:
    """All ranks run the same kernels from now on: one GPU of each kind proves for all (doctor/).

    Ranks: all of all replicas.
    """
    if mesh.device.type == "cuda" and mesh.world_size * mesh.replicas > 1:
        kinds = gather_objects(torch.cuda.get_device_name(mesh.device))
        store = dist.distributed_c10d._get_default_store()
        share(dist.PrefixStore(f"proofs {mesh.start}", store), kinds)


class Summing(Protocol):
    """An engine, as far as it adds up numbers of the ranks."""

    mesh: Mesh

    def all_reduce_scalars(self, values: Tensor) -> Tensor:
        """Their sum over the ranks."""


def gather_numbers(engine: Summing | None, mine: float) -> list[float]:
    """A number of every rank, on all of them, in rank order. Ranks: all."""
    if engine is None:
        return [mine]
    mesh = engine.mesh
    values = torch.zeros(mesh.world_size, dtype=torch.float64, device=mesh.device)
    values[mesh.rank] = mine
    return engine.all_reduce_scalars(values).tolist()


def broadcast_text(engine: Summing | None, text: str) -> str:
    """What rank 0 says, on every rank. Ranks: all."""
    if engine is None:
        return text
    return _texts(engine, text if engine.mesh.is_main else "").get(0, "")


def gather_errors(engine: Summing | None, mine: str | None) -> dict[int, str]:
    """Rank -> what went wrong there, of the ranks that have something to say. Ranks: all.

    Wire: 8 bytes a rank; 16 kB more where there is an error.
    """
    if not any(gather_numbers(engine, float(mine is not None))):
        return {}
    return {0: str(mine)} if engine is None else _texts(engine, mine or "")


def _texts(engine: Summing, mine: str) -> dict[int, str]:
    mesh = engine.mesh
    rows = torch.zeros(mesh.world_size, _TEXT_BYTES, dtype=torch.float64, device="cpu")
    raw = mine.encode()[:_TEXT_BYTES]
    rows[mesh.rank, : len(raw)] = torch.tensor(list(raw), dtype=torch.float64, device="cpu")
    sums = engine.all_reduce_scalars(rows.to(mesh.device)).to("cpu", torch.uint8).numpy()
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in sums]
    return {rank: text for rank, text in enumerate(texts) if text}
