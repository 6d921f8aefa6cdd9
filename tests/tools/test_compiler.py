"""make aot, make cuda-check: every rule can be broken, and the committed tables break none."""

import pytest

pytest.importorskip("triton", reason="needs triton")

from bench.compiler import aot, aot_table, cuda_check, sass
from bench.compiler.aot_rules import WHOLE, judge
from bench.compiler.sass import Instruction

GOOD = {
    **dict.fromkeys(aot_table.COUNTS, 0),
    **{"module": "toy", "kernel": "_toy_kernel", "calls": ["fwd bf16", "fwd fp16"]},
    **{"config": "BLOCK=64 w4 s2", "types": "bf16", "arch": 90, "launch": "0123456789"},
    **{"triton": "3.9.0", "grid": [4, 65535], "kind": "memory", "dots": [], "registers": 64},
    **{"shared_bytes": 1024, "warps": 4, "ctas_per_sm": 8, "instructions": 100, "warnings": []},
    **{"loop_instructions": 40, "tile_loads": 1, "tile_stores": 1, "wide_loads": 2},
    **{"narrow_loads": 2, "wide_load_bytes": 32, "narrow_load_bytes": 8, "wide_stores": 1},
    **{"wide_store_bytes": 16, "mufu": 3},
}
MATRIX = {**GOOD, "kind": "matrix", "dots": ["bf16"], "hgmma": 4, "waits": 2, "groups": 2}
AMPERE = {"arch": 80, "hgmma": 0}
RULES = [  # the rule that breaks; "": none does
    ("", GOOD, {}),
    ("", MATRIX, {}),
    ("", MATRIX, {**AMPERE, "hmma": 8}),
    ("", MATRIX, {"dots": ["f8E5M2"], "e4m3_products": 4}),
    ("spills", GOOD, {"spill_instructions": 2, "stack_bytes": 8}),
    ("spills", MATRIX, {"stack_bytes": 8}),
    ("shared memory", GOOD, {"shared_bytes": 232448 + 1}),
    ("shared memory", GOOD, {"arch": 80, "shared_bytes": 166912 + 1}),
    ("shared memory", GOOD, {"arch": 120, "shared_bytes": 101376 + 1}),
    ("", MATRIX, {"arch": 120, "hgmma": 0, "hmma": 8}),
    ("resident", MATRIX, {"ctas_per_sm": 0}),
    ("grid", GOOD, {"grid": [1, 65536]}),
    ("atomics", GOOD, {"float_atomics": 1}),
    ("products in flight", MATRIX, {"product_writes": 1}),
    ("pipelined products", MATRIX, {"warnings": ["C7513"]}),
    ("waits for products", MATRIX, {"waits": 4}),
    ("copies ahead", GOOD, {"staged": 1}),
    ("", GOOD, {"staged": 1, "ldgsts": 2}),
    ("tensor cores", MATRIX, {"hgmma": 0, "hmma": 8}),  # Ampere's instruction on Hopper
    ("tensor cores", MATRIX, AMPERE),
    ("8-bit products", MATRIX, {"dots": ["f8E4M3FN"]}),
    ("16-byte loads", GOOD, {"narrow_load_bytes": 32}),
    ("16-byte loads", GOOD, {"wide_load_bytes": 0, "wide_loads": 0}),
    ("16-byte stores", GOOD, {"narrow_store_bytes": 16, "narrow_stores": 2}),
]


def rules_broken(row, exempt=None):
    return [b.rule for b in judge(dict(row), exempt or {})[0]]


@pytest.mark.parametrize(("rule", "row", "change"), RULES)
def test_each_rule_can_be_broken(rule, row, change):
    assert rules_broken({**row, **change}) == [rule] * bool(rule)


def test_the_committed_table_covers_every_module():
    committed = aot_table.load(aot.TABLE)
    assert aot.MINIMUM in committed["triton"]
    assert len(committed["triton"]) == 2
    for version in committed["triton"]:
        rows = [row for row in committed["rows"] if row["triton"] == version]
        for arch in WHOLE:
            wanted = {name for name in aot.modules() if arch in aot.archs(aot.imported(name))}
            assert {row["module"] for row in rows if row["arch"] == arch} == wanted
    for row in committed["rows"]:
        assert set(rules_broken(row)) <= set(row["exempt"]), row


def cuda_row(*opcodes):
    kernel = sass.Kernel([Instruction(opcode) for opcode in opcodes], 32, 0, 0)
    return cuda_check.measure("op", "80", "op_kernel<float>", kernel)


CLEAN = ("LDG.E.128", "STG.E.128")


def test_rules_and_exemptions_of_cuda_kernels(monkeypatch, capsys):
    for opcodes, said in (
        (CLEAN, []),
        ((*CLEAN, "LDL"), ["spills: 1 LDL/STL, 0 bytes"]),
        (("LDG.E", "LDG.E", "STG.E.128"), ["16-byte loads: 2 narrower ones against 0"]),
        (("LDG.E.128", "STG.E.64", "STG.E.64"), ["16-byte stores: 2 narrower ones against 0"]),
        ((*CLEAN, "RED.E.ADD.F32"), ["atomics: 1 floating-point atomics: sums in no fixed order"]),
    ):
        problems = cuda_check.judge([cuda_row(*opcodes)], {})
        assert len(problems) == len(said)
        assert all(words in problem for words, problem in zip(said, problems))
    narrow = cuda_row("LDG.E", "STG.E.128")
    exempt = {"op_*": {"16-byte loads": "reads one number"}, "other": {"spills": "never"}}
    assert cuda_check.judge([narrow], exempt) == [
        "cuda: exemption: nothing breaks 'spills' under 'other'; delete it"
    ]
    monkeypatch.setenv("FASTPAR_CUDA", "0")
    assert cuda_check.main([]) == 0
    assert "skip: no nvcc found" in capsys.readouterr().out
