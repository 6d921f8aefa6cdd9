"""Proofs of several ranks: one proves, all go by the same."""

import threading
import time
from types import SimpleNamespace

import torch
from proofs import GELU
from torch.distributed import HashStore

from fastpar.doctor import doctor
from fastpar.doctor.table import ProofTable
from fastpar.kernels import choice
from fastpar.kernels.choice import OWN, STOCK, Proof


def test_one_rank_proves_and_all_have_its_result(monkeypatch):
    made, lock = [], threading.Lock()

    def prove(case, *how):
        with lock:
            made.append(threading.current_thread().name)
        time.sleep(0.1)
        return Proof(STOCK, "", (float(len(made)), 0.0))

    monkeypatch.setattr(doctor, "prove", prove)
    store, found = HashStore(), {}
    kind = ProofTable("cpu").about["device"]

    def rank(name):
        found[name] = doctor.Prover(store, [kind]).proof_of(GELU)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(made) == 1
    assert list(found.values()) == [Proof(STOCK, "", (1.0, 0.0))] * 4


def test_ranks_on_different_devices_run_what_both_can(monkeypatch, capsys):
    store, found = HashStore(), {}
    proofs = {"slow GPU": Proof(STOCK), "fast GPU": Proof(OWN)}

    def rank(kind):
        prover = doctor.Prover(store, proofs)
        prover.proof_here = lambda case: proofs[kind]
        prover.table = lambda device: SimpleNamespace(about={"device": kind})
        found[kind] = prover.proof_of(GELU)

    threads = [threading.Thread(target=rank, args=(kind,)) for kind in proofs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == dict.fromkeys(proofs, Proof(STOCK))
    assert "the ranks' GPUs differ (" in capsys.readouterr().err


def test_ranks_whose_fastest_attention_differs_run_own_and_are_told(capsys):
    case = choice.Case("cuda", "attention", torch.bfloat16, 64)
    proofs = {"A": Proof(OWN, serves=("flash", OWN)), "B": Proof(OWN, serves=("cudnn", "cudnn"))}
    assert doctor._common(case, proofs) == Proof(OWN)
    told = "differ in what serves it fastest (A: flash / own, B: cudnn / cudnn); own on all"
    assert told in capsys.readouterr().err


def test_one_rank_of_a_host_compiles_and_the_others_wait(monkeypatch, capsys):
    store, compiled = HashStore(), []

    def compile_all(cases, gpu):
        time.sleep(0.1)
        compiled.append(gpu)
        return ["_gelu_fwd_kernel: no registers"]

    monkeypatch.setattr(doctor, "warm", compile_all)
    seen = []

    def rank():
        doctor.Prover(store, ["GPU"]).warm([GELU], (90, 132))
        seen.append(list(compiled))

    threads = [threading.Thread(target=rank) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == [[(90, 132)]] * 3
    assert capsys.readouterr().err.count("not compiled ahead of its proof: _gelu_fwd") == 1
