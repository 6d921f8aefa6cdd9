"""A proof and the table that holds it."""

import torch

from fastpar.doctor.table import ProofTable
from fastpar.kernels.choice import Case

GELU = Case("cpu", "bias_gelu", torch.float32, 96)


def table_with(proofs):
    table = ProofTable("cpu")
    table.proofs = dict(proofs)
    table.save()
    return table
