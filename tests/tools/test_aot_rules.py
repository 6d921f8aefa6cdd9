"""make aot: machine code is read right, and every rule can be broken."""

import pytest

pytest.importorskip("triton", reason="needs triton")


from bench.compiler import sass
from bench.compiler.aot_rules import GPUS, judge

# A loop from .L_x_1 whose wait for a barrier was moved behind the kernel's end (.L_x_3), a shorter
# one behind it, the trap at the end, and a comment with an address that is no instruction.
LISTING = """\
        .section        .text._kernel,"ax",@progbits
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.64 R2, desc[UR8][R2.64] ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5 ;
        /*0040*/              @!P0 BRA `(.L_x_3) ;
.L_x_4:
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0060*/              @!P1 LDG.E.128.CONSTANT R8, desc[UR8][R2.64+0x10] ;
        /*0070*/                   STL [R1], R8 ;
        /*0080*/                   BRA.U UP0, `(.L_x_1) ;
.L_x_2:
        /*0090*/                   STG.E.U16 desc[UR8][R4.64], R8 ;
        /*00a0*/                   STG.E desc[UR8][R4.64], R8 ;
        /*00b0*/               @P2 BRA `(.L_x_2) ;
        /*00c0*/                   RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR8][R4.64], R8 ;
        /*00d0*/                   EXIT ;
.L_x_3:
        /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5 ;
        /*00f0*/              @!P0 BRA `(.L_x_3) ;
        /*0100*/                   BRA `(.L_x_4) ;
.L_x_5:
        /*0110*/                   BRA `(.L_x_5);
"""

GOOD = {
    "module": "toy",
    "kernel": "_toy_kernel",
    "calls": ["fwd bf16", "fwd fp16"],
    "config": "BLOCK=64 w4 s2",
    "types": "bf16",
    "arch": 90,
    "launch": "0123456789",
    "triton": "3.9.0",
    "grid": [4, 65535],
    "kind": "memory",
    "dots": [],
    "registers": 64,
    "stack_bytes": 0,
    "spill_instructions": 0,
    "loop_spills": 0,
    "shared_bytes": 1024,
    "warps": 4,
    "ctas_per_sm": 8,
    "instructions": 100,
    "loop_instructions": 40,
    "tile_loads": 1,
    "tile_stores": 1,
    "wide_loads": 2,
    "narrow_loads": 2,
    "wide_load_bytes": 32,
    "narrow_load_bytes": 8,
    "wide_stores": 1,
    "narrow_stores": 0,
    "wide_store_bytes": 16,
    "narrow_store_bytes": 0,
    "e4m3_products": 0,
    "hmma": 0,
    "hgmma": 0,
    "waits": 0,
    "groups": 0,
    "warnings": [],
    "ldgsts": 0,
    "tma": 0,
    "mufu": 3,
    "loop_mufu": 0,
    "overlapped_mufu": 0,
    "product_writes": 0,
    "float_atomics": 0,
}
MATRIX = {
    **GOOD,
    "kind": "matrix",
    "dots": ["bf16"],
    "hgmma": 4,
    "waits": 2,
    "groups": 2,
    "wide_loads": 0,
}
NARROW = {"narrow_load_bytes": 64, "narrow_loads": 16}


def rules_broken(row, exempt=None):
    return [b.rule for b in judge(dict(row), exempt or {})[0]]


# Reading machine code


def test_instructions_of_a_listing():
    code = sass.parse(LISTING)
    assert len(code) == 18
    assert [i.target for i in code if i.name == "BRA"] == [9, 14, 3, 9, 14, 5, 17]
    assert [i.conditional for i in code if i.name == "BRA"] == [True] * 5 + [False] * 2
    assert sass.loads(code) == sass.Accesses(1, 1, 16, 8)
    assert sass.loads(code[5:8]) == sass.Accesses(1, 0, 16, 0)
    assert sass.stores(code) == sass.Accesses(0, 2, 0, 6)
    assert sass.count(code, "LDL", "STL") == 1
    assert sass.float_atomics(code) == 1


def test_loops_are_natural_ones():
    """Not the jump back from the wait at 14 into the middle of the loop, nor the trap at 17."""
    code = sass.parse(LISTING)
    assert sass.loops(code) == [[3, 4, 5, 6, 7, 8, 14, 15, 16], [9, 10, 11], [14, 15]]
    assert [i.name for i in sass.main_loop(code)].count("HGMMA") == 1
    assert len(sass.main_loop(code)) == 9


def test_the_main_loop_is_the_shortest_of_equal_ones():
    """Of attention's two phases the one without a mask, wherever the compiler puts it."""
    masked, plain = (
        f"""
{label}:
        /*0000*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
{mask}        /*0020*/               @P0 BRA `({label}) ;
"""
        for label, mask in ((".L_x_0", "        /*0010*/  FSEL R4, R4, RZ, P1 ;\n"), (".L_x_1", ""))
    )
    for listing in (masked + plain, plain + masked):
        code = sass.parse(listing + "        /*0040*/                   EXIT ;\n")
        assert [i.name for i in sass.main_loop(code)] == ["HMMA", "BRA"]


def test_what_happens_while_a_product_is_in_flight():
    """R24 to R55 are the sums of the first group, R60 to R63 a part of the second's input."""
    lines = """\
FMUL R24, R1, R2 ;
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
MUFU.EX2 R1, R2 ;
HGMMA.64x8x16.F32.BF16 R64, R60, gdesc[UR8].tnspB, R64, gsb0 ;
F2FP.BF16.F32.PACK_AB R55, R3, R2 ;
WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
FMUL R24, R24, R2 ;
@P0 LDS.128 R57, [R60] ;
MUFU.EX2 R64, R2 ;
STS.128 [R4], R60 ;
WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
MUFU.EX2 R60, R2 ;""".splitlines()
    code = sass.parse("".join(f"        /*{i:04x}*/  {line}\n" for i, line in enumerate(lines)))
    assert len(code) == len(lines)
    assert sass.in_flight(code, "MUFU") == (2, 3)


@pytest.mark.parametrize(
    ("arch", "registers", "shared_bytes", "warps", "ctas"),
    [
        (90, 32, 0, 4, 16),  # the warps: 64 of them
        (90, 16, 0, 1, 32),  # the CTAs
        (90, 167, 0, 4, 3),  # registers: 168 a thread, 3 warps on each scheduler
        (90, 128, 0, 8, 2),
        (90, 255, 0, 8, 1),
        (90, 255, 0, 16, 0),
        (90, 32, 73 * 1024, 4, 3),  # shared memory
        (90, 32, 227 * 1024, 4, 1),
        (80, 32, 163 * 1024, 4, 1),
        (80, 32, 82 * 1024, 4, 1),
        (90, 64, 0, 12, 2),
    ],
)
def test_ctas_on_a_multiprocessor(arch, registers, shared_bytes, warps, ctas):
    assert GPUS[arch].ctas_per_sm(registers, shared_bytes, warps) == ctas


# Rules


def test_rows_that_break_no_rule():
    assert rules_broken(GOOD) == []
    assert rules_broken(MATRIX) == []
    assert rules_broken({**MATRIX, "arch": 80, "hgmma": 0, "hmma": 8}) == []
    assert rules_broken({**MATRIX, "dots": ["f32"], "hgmma": 0}) == []  # exact products
    assert rules_broken({**MATRIX, "dots": ["f8E5M2"], "e4m3_products": 4}) == []


BREAKS = [
    ("spills", GOOD, {"spill_instructions": 2, "stack_bytes": 8}),
    ("spills", GOOD, {"stack_bytes": 8}),
    ("spills", MATRIX, {"spill_instructions": 1}),
    ("shared memory", GOOD, {"shared_bytes": 232448 + 1}),
    ("shared memory", GOOD, {"arch": 80, "shared_bytes": 166912 + 1}),
    ("resident", MATRIX, {"ctas_per_sm": 0}),
    ("grid", GOOD, {"grid": [1, 65536]}),
    ("grid", GOOD, {"grid": [1, 1, 65536]}),
    ("atomics", GOOD, {"float_atomics": 1}),
    ("products in flight", MATRIX, {"product_writes": 1}),
    ("pipelined products", MATRIX, {"warnings": ["C7513"]}),
    ("waits for products", MATRIX, {"waits": 4}),
    ("tensor cores", MATRIX, {"hgmma": 0, "hmma": 8}),  # Ampere's instruction on Hopper
    ("tensor cores", MATRIX, {"arch": 80, "hgmma": 0}),
    ("8-bit products", MATRIX, {"dots": ["f8E4M3FN"]}),
    ("tensor cores", MATRIX, {"dots": ["f16", "f32"], "hgmma": 0}),
    ("16-byte loads", GOOD, {"narrow_load_bytes": 32}),
    ("16-byte loads", GOOD, {"wide_load_bytes": 0, "wide_loads": 0}),
    ("16-byte stores", GOOD, {"narrow_store_bytes": 16, "narrow_stores": 2}),
]


@pytest.mark.parametrize(("rule", "row", "change"), BREAKS)
def test_each_rule_can_be_broken(rule, row, change):
    assert rules_broken({**row, **change}) == [rule]


def test_single_numbers_are_not_tiles():
    """A kernel that reads a key and writes tiles; one that reads tiles and writes a loss."""
    assert rules_broken({**GOOD, "tile_loads": 0, "wide_load_bytes": 0}) == []
    assert rules_broken({**GOOD, "tile_stores": 0, "wide_store_bytes": 0}) == []


def test_an_exemption_is_for_its_calls_and_its_rule():
    row = {**GOOD, **NARROW}
    why = {"16-byte loads": "rows of odd length"}
    assert rules_broken(row, {"_toy_kernel *": why}) == []
    assert rules_broken(row, {"_toy_kernel fwd ??16": why}) == []
    assert rules_broken(row, {"_toy_kernel fwd bf16": why}) == ["16-byte loads"]  # not fp16
    assert rules_broken(row, {"_other_kernel *": why}) == ["16-byte loads"]
    assert rules_broken(row, {"_toy_kernel *": {"spills": "?"}}) == ["16-byte loads"]
    judge(row, {"_toy_kernel *": why})
    assert row["exempt"] == why
