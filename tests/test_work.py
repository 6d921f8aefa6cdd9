"""work.py: what the words between counting and timing carry."""

from fastpar.work import Op, Send


def test_words():
    op = Op("matmul", (4, 8, 16), "forward", 2.0 * 4 * 8 * 16, 4.0 * (32 + 128 + 64), 3)
    assert op.shape == (4, 8, 16)
    assert Send("all_reduce", "dp", 1e6, 4, 1, 1, "backward").under == "backward"
