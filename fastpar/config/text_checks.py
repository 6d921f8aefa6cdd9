"""What is refused of how text becomes steps: ramps of the batch, packed documents."""

from __future__ import annotations

from fastpar.config.options import DataSettings, ParallelSettings


def check_ramp(settings: DataSettings, pp: int) -> None:
    """Refuse a first batch that does not become batch_size, and one that a pipeline would have."""
    rows, first = settings.batch_size, settings.batch_ramp
    if first is None and settings.ramp_steps is not None:
        raise ValueError(
            "train: expected batch_ramp with ramp_steps, got ramp_steps="
            f"{settings.ramp_steps} alone; set --batch-ramp"
        )
    if first is not None and (rows % first or (rows // first).bit_count() != 1):
        fit = ", ".join(str(rows >> k) for k in range(rows.bit_length()) if rows % (1 << k) == 0)
        raise ValueError(
            f"train: expected batch_ramp to become batch_size={rows} by doubling, got batch_ramp="
            f"{first}; use one of {fit}"
        )
    if first is not None and pp > 1:
        raise ValueError(
            "train: expected pp=1 with batch_ramp, since stages want as many micro-batches in "
            f"every step, got pp={pp} batch_ramp={first}; leave one of them out"
        )


def check_packing(settings: DataSettings, parallel: ParallelSettings, *, compiled: bool) -> None:
    """Refuse packed documents where a rank has not whole rows and a whole model."""
    several = {"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp}
    found = [f"{name}={n}" for name, n in several.items() if n > 1] + ["compile=True"] * compiled
    if settings.pack == "documents" and found:
        raise ValueError(
            "train: expected whole rows and models on each rank with pack=documents, got "
            f"{', '.join(found)}; leave it out, or use --pack stream"
        )
