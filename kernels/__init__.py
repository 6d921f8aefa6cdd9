"""Ops for GPT-2-class models: functions from tensors to tensors, drop-in for torch's.

This folder is installed as the subpackage `fastpar.kernels`.
"""

if __name__ != "fastpar.kernels":
    raise ImportError(
        f"kernels: expected to be imported as fastpar.kernels, got {__name__}; "
        "run `pip install -e .` in the checkout and import fastpar.kernels"
    )
