"""Written from the table of __init__.py by `python tests/tools/test_import.py`."""

from fastpar import kernels as kernels
from fastpar import nn as nn
from fastpar import sharding as sharding
from fastpar._version import __version__ as __version__
from fastpar.axes.replicas import Outer as Outer
from fastpar.checkpoint.restore import load_checkpoint as load_checkpoint
from fastpar.checkpoint.saver import Saver as Saver
from fastpar.checkpoint.saver import save_checkpoint as save_checkpoint
from fastpar.comm.mesh import Mesh as Mesh
from fastpar.engine.engine import engine_of as engine_of
from fastpar.engine.parallelize import parallelize as parallelize
from fastpar.engine.pipeline_step import pipeline_step as pipeline_step
from fastpar.foreign.patch import patch as patch
from fastpar.foreign.patch import unpatch as unpatch
from fastpar.models.gpt import GPT as GPT
from fastpar.optim.adafactor import Adafactor as Adafactor
from fastpar.optim.adamw import AdamW as AdamW
from fastpar.optim.graphs import graphed as graphed
from fastpar.optim.muon import Muon as Muon
from fastpar.optim.muon import muon_groups as muon_groups
from fastpar.settings.model import GPTConfig as GPTConfig
from fastpar.settings.parallel import Offload as Offload
from fastpar.settings.parallel import Parallel as Parallel
from fastpar.settings.parallel import Pipeline as Pipeline
from fastpar.settings.parallel import Precision as Precision
from fastpar.settings.parallel import Wires as Wires
