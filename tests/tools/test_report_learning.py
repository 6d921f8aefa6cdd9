"""Tables of what recipes learned: seeds and spreads, steps to AdamW's loss, Muon's shared step."""

from bench.records import Row
from bench.report.learning import steps_table, time_table

MACHINE = {"device": "cpu", "cpu": "Test CPU", "cores": 2, "python": "3.11", "torch": "2.13"}
MACHINE |= {"triton": "", "commit": "abc", "dirty": False, "date": "2026-01-01"}


def row(bits, seed=1, cpu_s=100, **settings):
    settings = {"batch_size": 16, "lr_schedule": "linear", "max_steps": 150, **settings}
    words = [f"{k}={v}" for k, v in settings.items() if k in ("lr", "max_steps")]
    return {
        "recipe": ", ".join(["tried", *words]),
        "settings": {**settings, "seed": seed},
        "seed": seed,
        "bits_per_byte": bits,
        "cpu_s": cpu_s,
        "machine": MACHINE,
    }


MUON = {"optimizer": "muon", "max_steps": 75, "lr": 0.02, "cpu_s": 70}
ROWS = [
    row(2.0, lr=0.005),
    row(1.71, lr=0.0025),
    row(1.75, seed=2, lr=0.0025),
    row(1.76, seed=3, lr=0.0025),
    row(1.72, lr=0.001),
    row(1.70, **MUON),
    row(1.76, seed=2, **MUON),
    row(1.60, seed=3, **MUON),
    row(1.50, optimizer="muon", max_steps=300, lr=0.02),  # longer than AdamW's
    row(1.0, lr=0.005, batch_size=8),  # a task in which AdamW was not swept
    row(0.9, optimizer="muon", batch_size=8, max_steps=50),
]


def test_steps_to_adamws_loss_are_counted_by_seed():
    lines = steps_table(ROWS).splitlines()[2:]
    assert len(lines) == 4
    task = "| 4 x 256, 16 x 128 |"
    tuned = f"{task} **AdamW, lr 0.0025** | 150 | 1.00x | 3 | 1.740 (1.710 to 1.760) |  | 1.00x |"
    assert tuned in lines
    muon = f"{task} Muon, lr 0.02 | 75 | 0.50x | 3 | 1.687 (1.600 to 1.760) | 2 of 3 | 0.70x |"
    assert muon in lines


def test_time_to_a_loss_is_steps_of_the_mean_curve_at_measured_times():
    """The loss that all reach is 2.4, by int8 at its end; by the mean of fp32 two thirds of the way
    from 3.0 at step 100 to 2.1 at step 200."""

    def curve(name, *bits):
        moments = [[100 * (i + 1), b] for i, b in enumerate(bits)]
        return {"format": name, "steps": 100 * len(bits), "curve": moments}

    rows = [
        {"format": "fp32", "steps": 500, "bits_per_byte": 1.0},
        curve("fp32", 1.0),  # a shorter run
        curve("fp32", 3.1, 2.0),
        curve("fp32", 2.9, 2.2),
        curve("int8, weights too", 3.5, 2.4),
        curve("int4", 3.5, 9.0),  # no step of it was measured
    ]
    steps = [
        Row("wires", "", "step", variant, "cpu", "", 1, median_ms=ms, notes={"link_mbit": mbit})
        for variant, ms, mbit in (
            ("fastpar ZeRO-2", 30.0, 1000),
            ("fastpar ZeRO-2, int8 both", 60.0, 100),
        )
    ]
    head, _, *lines = time_table(rows, steps).splitlines()
    assert "steps to 2.400 bits a byte" in head
    assert lines == [
        "| fp32 | 2 | 167 | fastpar ZeRO-2 | 30 | 5 |  |  |",
        "| int8, weights too | 1 | 200 | fastpar ZeRO-2, int8 both |  |  | 60 | 12 |",
    ]
    assert time_table([], []).startswith("No curves")
