"""What a compiled kernel will do, read from the machine code: no GPU is needed.

The disassemblers are those inside Triton. Byte counts are per thread: an LDG.E.128 is 16 bytes.
"""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L\w*):")
_TARGET = re.compile(r"^(.*)`\((\.L\w*)\)")
_JUMP = re.compile(r"BRA\b|CALL\.REL\.NOINC")  # that call never returns: a jump out of a loop
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\S+?),.*$", re.MULTILINE)
_REGISTER = re.compile(r"R(\d+)\b")
_COLUMNS = re.compile(r"64x(\d+)x")
_ATOMIC = re.compile(r"^(?:RED|ATOM|ATOMG|REDG)\.(?:.*\.)?(?:F16|F32|F64|BF16)")


# Of tensor cores; those of 8-bit floats begin with a Q.
WARP_PRODUCTS, GROUP_PRODUCTS = ("HMMA", "QMMA"), ("HGMMA", "QGMMA")
PRODUCTS = (*WARP_PRODUCTS, *GROUP_PRODUCTS)


@dataclass(frozen=True)
class Instruction:
    opcode: str  # "LDG.E.128"
    target: int | None = None  # of a branch: index of the instruction it goes to
    conditional: bool = False  # whether the next instruction may follow a branch or exit
    operands: str = ""

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def bytes(self) -> int:
        """Bytes of one thread's memory access."""
        parts = self.opcode.split(".")
        for part, size in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
            if part in parts:
                return size
        return 4


def parse(text: str) -> list[Instruction]:
    """The instructions of a listing by `nvdisasm -c`."""
    starts = {}  # label -> index of the first instruction behind it
    found: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            starts[label[1]] = len(found)
        elif instruction := _INSTRUCTION.match(line):
            found.append((instruction[1] or "", instruction[2], instruction[3]))
    code = []
    for predicate, opcode, operands in found:
        target = _TARGET.match(operands) if _JUMP.match(opcode) else None
        if target is None:
            code.append(Instruction(opcode, None, bool(predicate), operands))
        else:  # BRA.U and BRA.DIV have their conditions among the operands
            conditional = bool(predicate or target[1].strip() or opcode.startswith("BRA."))
            code.append(Instruction(opcode, starts.get(target[2]), conditional))
    return code


def _next(code: Sequence[Instruction]) -> list[list[int]]:
    """For each instruction those that may follow it."""
    edges = []
    for at, i in enumerate(code):
        to = [] if i.target is None else [i.target]
        ends = i.name == "EXIT" or i.target is not None
        if at + 1 < len(code) and (i.conditional or not ends):
            to.append(at + 1)
        edges.append(to)
    return edges


def _reached(start: int, edges: Sequence[Sequence[int]], closed: int) -> set[int]:
    """What a walk from start reaches without closed."""
    seen = {start} - {closed}
    todo = list(seen)
    while todo:
        for to in edges[todo.pop()]:
            if to != closed and to not in seen:
                seen.add(to)
                todo.append(to)
    return seen


def loops(code: Sequence[Instruction]) -> list[list[int]]:
    """Indices in the natural loops: a branch back to an instruction that every way to the branch
    passes. Jumps back from code that was moved out of line, as waits for a barrier are, are none.
    """
    edges = _next(code)
    back: list[list[int]] = [[] for _ in code]
    for at, to in enumerate(edges):
        for there in to:
            back[there].append(at)
    bodies: dict[int, set[int]] = {}
    for at, i in enumerate(code):
        head = i.target
        if head is not None and head < at and at not in _reached(0, edges, head):
            bodies.setdefault(head, {head}).update(_reached(at, back, head))
    return [sorted(body) for _, body in sorted(bodies.items())]


def main_loop(code: Sequence[Instruction]) -> Sequence[Instruction]:
    """The shortest loop with most tensor-core work, then most memory traffic; [] without one."""

    def work(body: Sequence[int]) -> tuple[int, int, int]:
        here = [code[at] for at in body]
        traffic = sum(i.bytes for i in here if i.name in ("LDG", "STG", "LDGSTS"))
        return count(here, *PRODUCTS), traffic, -len(body)

    busy = [set(body) for body in loops(code) if work(body)[:2] != (0, 0)]
    inner = [sorted(body) for body in busy if not any(other < body for other in busy)]
    return [code[at] for at in max(inner, key=work, default=[])]


LOADS, STORES = ("LDG", "LDGSTS"), ("STG",)


def accesses(loads: Sequence[Instruction], stores: Sequence[Instruction]) -> dict[str, int]:
    """Columns of a table: global loads and stores of 16 bytes, narrower ones, and their bytes."""
    found: dict[str, int] = {}
    for what, code, names in (("load", loads, LOADS), ("store", stores, STORES)):
        sizes = [i.bytes for i in code if i.name in names]
        for kind, is_wide in (("wide", True), ("narrow", False)):
            some = [size for size in sizes if (size == 16) == is_wide]
            found |= {f"{kind}_{what}s": len(some), f"{kind}_{what}_bytes": sum(some)}
    return found


def count(code: Sequence[Instruction], *names: str) -> int:
    return sum(i.name in names for i in code)


def _held(product: Instruction) -> set[int]:
    """Registers of HGMMA.64xNx16 d, a, b, d: the sums' N / 2, and 4 if a is in registers."""
    named = [_REGISTER.match(x.strip()) for x in product.operands.split(",")[:2]]
    columns = _COLUMNS.search(product.opcode)
    sizes = (int(columns[1]) // 2 if columns else 4, 4)
    starts = [(int(n[1]), size) for n, size in zip(named, sizes) if n]
    return {r for first, size in starts for r in range(first, first + size)}


def in_flight(code: Sequence[Instruction], name: str) -> tuple[int, int]:
    """(instructions of this name that run while a warp group's product is in flight, instructions
    that write its registers meanwhile), in the order of the listing. A group of products ends with
    gsb0; WARPGROUP.DEPBAR.LE gsb0, n waits until n are in flight."""
    found = wrong = 0
    groups: list[set[int]] = []
    open_group = False
    for i in code:
        if i.name in GROUP_PRODUCTS:
            if not open_group:
                groups.append(set())
            groups[-1] |= _held(i)
            open_group = "gsb0" not in i.operands
        elif i.opcode.startswith("WARPGROUP.DEPBAR"):
            del groups[: max(0, len(groups) - int(i.operands.rpartition(",")[2], 16))]
        else:
            to = _REGISTER.match(i.operands.strip())
            found += bool(groups) and i.name == name
            size = max(1, i.bytes // 4) if i.name.startswith("LD") else 1 + (".WIDE" in i.opcode)
            if to and not i.name.startswith(("ST", "RED", "BAR")):
                written = set(range(int(to[1]), int(to[1]) + size))
                wrong += any(written & held for held in groups)
    return found, wrong


def float_atomics(code: Sequence[Instruction]) -> int:
    """Sums whose order, and so whose last bits, change from run to run."""
    return sum(bool(_ATOMIC.match(i.opcode)) for i in code)


class Kernel(NamedTuple):
    code: list[Instruction]
    registers: int  # of a thread
    stack_bytes: int
    shared_bytes: int  # static, of a block


def kernels(cubin: Path) -> dict[str, Kernel]:
    """What a file of machine code holds, by mangled name."""
    from triton import knobs

    def output(*command: str) -> str:
        run = subprocess.run([*command, str(cubin)], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(
                f"disassemble: expected exit code 0 of {Path(command[0]).name}, got "
                f"{run.returncode} ({run.stderr.strip()}); reinstall triton"
            )
        return run.stdout

    usages = output(knobs.nvidia.cuobjdump.path, "-res-usage")
    listing = output(knobs.nvidia.nvdisasm.path, "-c", "-ndf")  # no data flow: a third faster
    texts = dict(zip(*[iter(_SECTION.split(listing)[1:])] * 2))
    return {
        name: Kernel(parse(texts[name]), int(registers), int(stack), int(shared))
        for name, registers, stack, shared in _USAGE.findall(usages)
    }


def disassemble(cubin: bytes) -> tuple[list[Instruction], int, int]:
    """(instructions, registers of a thread, bytes of its stack) of a file of one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        (kernel,) = kernels(path).values()
    return kernel.code, kernel.registers, kernel.stack_bytes
