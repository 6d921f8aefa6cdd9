"""A checkpoint's folder made by hand, without the code that writes one, and changes to it."""

import hashlib
import json
import math

import torch

from fastpar.checkpoint.manifest import MANIFEST, FileEntry, Manifest, TensorEntry, digest_of
from fastpar.files.tensor_file import DTYPE_NAMES, Spec, TensorFile
from fastpar.sharding.placements import Run

WEIGHTS = {"transformer.wte.weight": (7, 4), "transformer.ln_f.bias": (4,)}
# PARAMETER/ENTRY -> its pieces: what each of two files has.
PIECES = {
    "wte.weight/exp_avg": [[Run(0, 16)], [Run(16, 12)]],
    "wte.weight/exp_avg_sq": [[Run(0, 2, 4, 7)], [Run(2, 2, 4, 7)]],
    "wte.weight/step": [[Run(0, 1)], []],
    "ln_f.bias/exp_avg": [[Run(0, 1), Run(3, 1)], [Run(1, 2)]],
}
SHAPES = {"wte.weight/step": (), "ln_f.bias/exp_avg": (4,)}


def make_folder(folder, step=5, seed=0):
    """Weights in one file, pieces of the optimizer's state in two; the manifest."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    files, kinds = {}, {"weights": [], "optimizer": []}

    def write(kind, name, runs_of, shapes):
        values = {}
        for key, runs in runs_of.items():
            numel = sum(run.numel for run in runs)
            shape = shapes[key] if kind == "weights" else (numel,)
            dtype = torch.float64 if key.endswith("/step") else torch.float32
            values[key] = torch.randn(shape, generator=generator, dtype=dtype)
        specs = {key: Spec(v.dtype, v.shape) for key, v in values.items()}
        with TensorFile(folder / name, specs) as file:
            for key, value in values.items():
                file.write(key, value)
        raw = (folder / name).read_bytes()
        head = 8 + int.from_bytes(raw[:8], "little")
        files[name] = FileEntry(len(raw), digest_of(raw[:head]), head)
        for key, value in values.items():
            digest = digest_of(value.numpy().tobytes())
            dtype = DTYPE_NAMES[value.dtype]
            entry = TensorEntry(name, key, dtype, tuple(shapes[key]), tuple(runs_of[key]), digest)
            kinds[kind].append(entry)

    whole = {key: [Run(0, math.prod(shape))] for key, shape in WEIGHTS.items()}
    write("weights", "model.safetensors", whole, WEIGHTS)
    shapes = {key: SHAPES.get(key, (7, 4)) for key in PIECES}
    for i in range(2):
        pieces = {key: parts[i] for key, parts in PIECES.items() if parts[i]}
        write("optimizer", f"optimizer-0000{i + 1}-of-00002.safetensors", pieces, shapes)
    for name, value in (("config.json", {"n_embd": 4}), ("trainer_state.json", {"step": step})):
        raw = json.dumps(value).encode()
        (folder / name).write_bytes(raw)
        files[name] = FileEntry(len(raw), digest_of(raw), len(raw))
    manifest = Manifest(step, files, tuple(kinds["weights"]), tuple(kinds["optimizer"]), "gpt")
    (folder / MANIFEST).write_bytes(manifest.sealed())
    return manifest


def reseal(folder, change):
    """Changes what a manifest says, and makes its digest right again."""
    content = json.loads((folder / MANIFEST).read_bytes())
    del content["digest"]
    change(content)
    text = json.dumps(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / MANIFEST).write_text(f'{text[:-1]}, "digest": "{digest}"}}\n')
