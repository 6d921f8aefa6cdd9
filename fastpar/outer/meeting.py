"""Where replicas meet: who takes part in an exchange, over which group, and whether it counts.

A replica may die at any moment, and come back; no process group survives that. So the replicas
agree on each exchange in a store that none of them has, under the exchange's number and attempt:

    here      every rank of a replica says that it is there
    members   once all replicas that live are there, whoever sees it first writes who they are
    sums      over a group of the members' ranks of the same number, kept as long as the members are
    verdict   "done" when every rank of every member has its sums, "failed" as soon as one is dead
              or has an error: then all try again, with who is left

A replica lives while the beats of its ranks change. So all that go on have used the same sums.

[Note: copies] A replica that starts when the others have begun, or behind them, does not count as
living. It asks; before their next exchange one of them gives it all that it has, which makes it a
copy of that one, and both take part. One that was silent for so long that the others went on is not
among the members; it fails, and may start again.
"""

from __future__ import annotations

import functools
import io
import itertools
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fastpar.comm.collectives import Collectives, OneRank
from fastpar.comm.mesh import Mesh
from fastpar.comm.watchdog import waiting
from fastpar.outer.peers import Peers

T = TypeVar("T")
POLL_S = 0.01
_ROOT = "fastpar/outer"
OPEN = "open"  # the replicas have begun
ENDED = "ended"  # a replica has come to its end
LATEST = "latest"  # exchange that counted


_here: weakref.WeakValueDictionary[str, Meeting] = weakref.WeakValueDictionary()  # this process's


def bury(store: dist.Store, replica: int, ranks: int) -> None:
    """A replica is known to be dead: nobody need wait until its ranks were silent for long."""
    for rank in range(ranks):
        store.delete_key(f"{_ROOT}/beat/{replica}/{rank}")


class Meeting:
    """One rank's side of the meetings of its replica with the others.

    Args:
        mesh: of this replica.
        silent_s: a rank whose beat has not changed for so long is dead.
    Attributes:
        members: of the last exchange: numbers of replicas.
        sent: bytes that this rank has sent to others.
    """

    def __init__(self, mesh: Mesh, silent_s: float) -> None:
        self.mesh, self.silent_s = mesh, silent_s
        self.replica, self.replicas = mesh.replica, mesh.replicas
        self.store: Any = mesh.store and dist.PrefixStore(_ROOT, mesh.store)
        self._me = uuid.uuid4().hex
        _here[self._me] = self
        self._seen: dict[str, tuple[bytes, float]] = {}  # beat -> its value, and since when
        self._names: tuple[str, ...] = ()
        self._group: Collectives | None = None
        self._stop: Callable[[], Any] = lambda: None
        self.members: list[int] = [self.replica]
        self._sent = 0
        self._old: list[list[str]] = []  # keys of the last exchanges

    @property
    def sent(self) -> int:
        return self._sent + getattr(self._group, "sent", 0)

    def open(self, done: int, settings: str) -> bool:
        """Begin, after so many exchanges; whether this replica is to become a copy of another.

        Ranks: all of all replicas, but those that come later.
        Raises:
            ValueError: replicas with other settings; a second Outer in this process.
            RuntimeError: a replica did not come.
        """
        if self.store is None:
            return False
        beat = self._key("beat")
        if self.store.check([beat]) and self.store.get(beat).decode().split()[0] in _here:
            raise ValueError(
                "Outer: expected one at a time that meets other replicas, got a second one on "
                f"replica {self.replica}; train the other model in a run of its own"
            )
        if self.store.check([OPEN]):
            return True
        self._beat()
        self.store.set(self._key("founder"), f"{done} {settings}")
        everyone = [self._key("founder", m, r) for m in self._all() for r in self._ranks()]
        came = self._until(lambda: self.store.check(everyone) or self.store.check([OPEN]))
        there = [key for key in everyone if self.store.check([key])]
        if not came:
            raise RuntimeError(
                f"Outer: expected {self.replicas} replicas, got {len(there)} of {len(everyone)} "
                f"ranks within {self.mesh.timeout_s:g} s; start every replica, or fewer"
            )
        mine = [self._key("founder", m) for m in self._all()]  # of ranks with the same pieces
        told = [self.store.get(k).decode().split(" ", 1) for k in mine if k in there]
        for _, theirs in told:
            if theirs != settings:
                raise ValueError(
                    f"Outer: expected the same on every replica, got '{theirs}' where replica "
                    f"{self.replica} has '{settings}'; start all with the same settings"
                )
        self.store.set(OPEN, "yes")
        behind = done < max(int(count) for count, _ in told)
        if behind:
            self.leave()
        return behind

    def exchange(self, number: int, sums: Callable[[Collectives], T]) -> T:
        """What sums() returns of the members' group; it may be called several times.

        Ranks: all of the replicas that live, with the same numbers in the same order.
        """
        if self.store is None:
            return sums(OneRank(torch.device("cpu")))
        for attempt in itertools.count():
            key = f"{number}/{attempt}"
            self.members = self._agree_on_members(number, key)
            result, error = None, None
            try:
                result = sums(self._group_of_members(key))
            except RuntimeError as caught:
                error = caught
            if self._verdict(key, error is None):
                self._forget_older(number, key)
                return result  # type: ignore[return-value]
            self._drop_group()
        raise AssertionError

    def _forget_older(self, number: int, key: str) -> None:
        """Nobody looks at the exchange before the last one any more."""
        mine = [self._key(f"{key}/here")]
        if self.replica == self.members[0] and self.mesh.rank == 0:
            self.store.set(LATEST, str(number))
            mine += [f"{key}/members", f"{key}/done", f"{key}/verdict"]
        self._old.append(mine)
        for old in self._old.pop(0) if len(self._old) > 2 else ():
            self.store.delete_key(old)

    def _agree_on_members(self, number: int, key: str) -> list[int]:
        self.store.set(self._key(f"{key}/here"), self._me)

        def decided() -> bool:
            went_on = self.store.check([LATEST]) and int(self.store.get(LATEST)) > number
            if went_on or self.store.check([f"{key}/members"]):
                return True
            late = [m for m in self._all() if not self._is_here(key, m)]
            if any(self._lives(m) for m in late):
                return False
            there = [str(m) for m in self._all() if m not in late]
            self.store.compare_set(f"{key}/members", "", ",".join(there))
            return True

        self._until(decided, forever=True)
        known = f"{key}/members"
        told = self.store.get(known).decode() if self.store.check([known]) else ""
        members = [int(m) for m in told.split(",") if m]
        if self.replica not in members:
            raise RuntimeError(
                f"Outer: expected every replica to beat within silent_s={self.silent_s:g}, got "
                f"none of replica {self.replica}, without which the others went on; start it again"
            )
        return members

    def _is_here(self, key: str, replica: int) -> bool:
        return self.store.check([self._key(f"{key}/here", replica, r) for r in self._ranks()])

    def _group_of_members(self, key: str) -> Collectives:
        """The group of the last exchange if it had the same processes, or a new one."""
        rank = self.mesh.rank
        keys = [self._key(f"{key}/here", m, rank) for m in self.members]
        names = tuple(self.store.get(k).decode() for k in keys)
        if self._group is None or names != self._names:
            self._drop_group()
            self._names, at = names, self.members.index(self.replica)
            store = dist.PrefixStore(f"{key}/group/{rank}", self.store)
            alone = len(names) == 1
            self._group = (
                OneRank(torch.device("cpu"))
                if alone
                else Peers(store, at, len(names), self.mesh.timeout_s)
            )
        return self._group

    def _drop_group(self) -> None:
        self._sent, self._group = self.sent, None

    def _verdict(self, key: str, fine: bool) -> bool:
        """Whether the exchange counts, the same for all."""
        verdict = f"{key}/verdict"
        if fine:
            self.store.add(f"{key}/done", 1)
        else:
            self.store.compare_set(verdict, "", "failed")
        needed = len(self.members) * self.mesh.world_size

        def decided() -> bool:
            if self.store.check([verdict]):
                return True
            if self.store.add(f"{key}/done", 0) == needed:
                self.store.compare_set(verdict, "", "done")
            elif not all(self._lives(m) for m in self.members):
                self.store.compare_set(verdict, "", "failed")
            return False

        self._until(decided, forever=True)
        return self.store.get(verdict) == b"done"

    # Who lives

    def _beat(self) -> None:
        """From now on this rank lives, until leave() or its end."""
        stop, key = threading.Event(), self._key("beat")

        def run(store: Any, me: str) -> None:
            for count in itertools.count():
                store.set(key, f"{me} {count}")
                if stop.wait(min(0.5, self_silent / 4)):
                    store.delete_key(key)
                    return

        self_silent = self.silent_s
        self.store.set(key, f"{self._me} -")
        # A connection of its own: while a group is made, another rank's address is waited for in
        # the store, and a connection serves one at a time.
        args = self.store.clone(), self._me
        thread = threading.Thread(target=run, args=args, daemon=True, name="fastpar outer beat")
        thread.start()

        def end() -> None:
            stop.set()
            if thread is not threading.current_thread():  # which may be the one that collects
                thread.join(self_silent)

        self._stop = end
        # Also when the process ends: it aborts if a thread is in the store then.
        weakref.finalize(self, end)

    def leave(self, *, ended: bool = False) -> None:
        """The others go on without this replica; it may come back as a copy, if they do."""
        if ended and self.store is not None:
            self.store.set(ENDED, "yes")
        self._stop()
        self._stop = lambda: None
        self._drop_group()

    def _lives(self, replica: int) -> bool:
        return all(self._changes(self._key("beat", replica, r)) for r in self._ranks())

    def _changes(self, key: str) -> bool:
        now = time.monotonic()
        value = self.store.get(key) if self.store.check([key]) else b""
        before, since = self._seen.get(key, (b"", now))
        if value != before:
            self._seen[key] = value, now
            since = now
        return bool(value) and now - since < self.silent_s

    # Copies

    def asking(self) -> list[int]:
        """The replicas that ask for a copy, and have it from this one. By rank 0 alone."""
        found = []
        for m in self._all() if self.store is not None else ():
            keys = [self._key("ask", m, r) for r in self._ranks()]
            if m == self.replica or not self.store.check(keys):
                continue
            claim = f"claim/{self.store.get(keys[0]).decode()}"
            if self.store.compare_set(claim, "", self._me) == self._me.encode():
                found.append(m)
        return found

    def give(self, replica: int, state: dict[str, Any], number: int) -> bool:
        """Make that replica's rank a copy before exchange `number`; False: it is gone again."""
        ask = self._key("ask", replica, self.mesh.rank)
        name = self.store.get(ask).decode()
        self.store.delete_key(ask)
        file = io.BytesIO()
        torch.save(state, file)
        content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        try:
            self.store.set(f"given/{name}", "yes")
            peer = Peers(dist.PrefixStore(f"copy/{name}", self.store), 0, 2, self.mesh.timeout_s)
            peer.broadcast(torch.tensor([content.numel()], dtype=torch.int64, device="cpu"), 0)
            peer.broadcast(content, 0)
            self._sent += peer.sent
        except RuntimeError:
            return False
        there = functools.partial(self._is_here, f"{number}/0", replica)
        return self._until(there, seconds=self.silent_s)

    def become_copy(self) -> dict[str, Any]:
        """The state of another replica, which has given it. Ranks: all of a replica."""
        self.store.set(self._key("ask"), self._me)
        given, alone = f"given/{self._me}", time.monotonic() + 2 * self.silent_s

        def answered() -> bool:
            nonlocal alone
            if any(self._lives(m) for m in self._all()):
                alone = time.monotonic() + 2 * self.silent_s
            over = time.monotonic() > alone or self.store.check([ENDED])
            return self.store.check([given]) or over

        self._until(answered, forever=True)
        if not self.store.check([given]) and self.store.check([ENDED]):
            raise RuntimeError(
                f"Outer: expected another replica to give replica {self.replica} a copy, got none: "
                "they have ended; there is nothing left to do"
            )
        if not self.store.check([given]):
            raise RuntimeError(
                f"Outer: expected another replica to give replica {self.replica} a copy, "
                "got none of them lives; start all of them again, from their checkpoints"
            )
        store = dist.PrefixStore(f"copy/{self._me}", self.store)
        peer = Peers(store, 1, 2, self.mesh.timeout_s)
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        peer.broadcast(size, 0)
        content = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        peer.broadcast(content, 0)
        self._beat()
        return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)

    # Names and waits

    def _all(self) -> range:
        return range(self.replicas)

    def _ranks(self) -> range:
        return range(self.mesh.world_size)

    def _key(self, what: str, replica: int | None = None, rank: int | None = None) -> str:
        m = self.replica if replica is None else replica
        return f"{what}/{m}/{self.mesh.rank if rank is None else rank}"

    def _until(
        self, true: Callable[[], bool], *, seconds: float | None = None, forever: bool = False
    ) -> bool:
        """Wait until something is true; False if that takes too long."""
        limit = self.mesh.timeout_s if seconds is None else seconds
        deadline = time.monotonic() + limit
        with waiting("a meeting of replicas"):
            while not true():
                if not forever and time.monotonic() > deadline:
                    return False
                time.sleep(POLL_S)
        return True
