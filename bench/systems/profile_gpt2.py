"""`fastpar profile` of GPT-2 without the packages of the command line, as gpu.sh needs it.

    python -m bench.systems.profile_gpt2 --out DIR [--device cpu] [--quick]

Tokens are random numbers in a .bin file: no text, no tokenizer, no network.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastpar.config.config import TrainConfig
from fastpar.profile.profile import ProfileOptions, run_profile

GPT2 = {"model": "gpt2", "batch_size": 32, "micro_batch_size": 16, "dropout": 0.0}
TINY = {"model": "micro", "n_layer": 2, "batch_size": 4, "micro_batch_size": 2, "threads": 1}


def write_tokens(folder: Path, vocab_size: int, count: int) -> None:
    """train.bin and val.bin, in which the largest number occurs."""
    rng = np.random.default_rng(0)
    for name in ("train", "val"):
        tokens = rng.integers(0, vocab_size, count).astype(np.uint16)
        tokens[-1] = vocab_size - 1
        tokens.tofile(folder / f"{name}.bin")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.systems.profile_gpt2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", required=True, help="new folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does the code run?")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(argv)
    settings: dict[str, Any] = TINY if args.quick else GPT2
    picture = importlib.util.find_spec("matplotlib") is not None
    if not picture:
        print("no picture: matplotlib is missing")
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder), 512 if args.quick else 50257, 1 << 16)
        data = {"data": folder, "tokenizer": "ids", "device": args.device}
        try:
            config = TrainConfig().replace({**settings, **data})
            return run_profile(ProfileOptions(args.steps, args.out, picture), config, [])
        except (ValueError, torch.cuda.OutOfMemoryError) as error:
            print(error, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
