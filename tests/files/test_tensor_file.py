"""safetensors files: written in pieces, the same bytes; headers of others: nonsense is refused."""

import json
import os
import tracemalloc

import pytest
import torch
from cells import sweep
from safetensors.torch import load_file, save_file

from fastpar.files.tensor_file import (
    DTYPE_NAMES,
    Place,
    Spec,
    Stored,
    TensorFile,
    bytes_of,
    parse_header,
    read_header,
)


def specs_of(tensors):
    return {name: Spec(t.dtype, t.shape) for name, t in tensors.items()}


def some_tensors():
    """Tensors of every dtype, with and without dims and elements, in no order."""
    return {
        f"h.{10 - i}/\u00e9.{len(shape)}.{sum(shape)}": torch.randint(0, 9, shape).to(dtype)
        for i, dtype in enumerate(DTYPE_NAMES)
        for shape in ((3,), (2, 5), (), (0,))
    }


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@pytest.mark.parametrize("order", [1, -1])
def test_the_same_bytes_as_save_file(tmp_path, metadata, order):
    turned = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.zeros(0, dtype=torch.uint8)}
    for i, tensors in enumerate((some_tensors(), turned, {})):
        file = tmp_path / f"{i}"
        with TensorFile(file, specs_of(tensors), metadata) as written:
            for name in list(tensors)[::order]:
                written.write(name, tensors[name])
        save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "b", metadata)
        assert file.read_bytes() == (tmp_path / "b").read_bytes()


def test_a_transposed_tensor_is_written_in_tiles(tmp_path):
    """Never turned as a whole; what sees the blocks sees the file's bytes in order."""
    for dtype in (torch.float32, torch.bfloat16):
        x, seen = torch.randn(256, 1000).to(dtype).t(), bytearray()
        with TensorFile(tmp_path / "a", {"x": Spec(dtype, x.shape)}) as file:
            tracemalloc.start()
            file.write("x", x, lambda block: None)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < x.nbytes / 4
        assert torch.equal(load_file(tmp_path / "a")["x"], x)
        with TensorFile(tmp_path / "a", {"x": Spec(dtype, x.shape)}) as file:
            file.write("x", x, seen.extend)
        assert seen == (tmp_path / "a").read_bytes()[len(file.head) :]


def test_reading_into_memory_leaves_a_storage_resizable():
    x = torch.arange(4.0)
    bytes_of(x)[4:8] = 0
    assert x.tolist() == [0.0, 0.0, 2.0, 3.0]
    x.untyped_storage().resize_(0)
    assert bytes_of(torch.empty(0)).size == 0


SPEC = Spec(torch.float32, [2])
OK = torch.zeros(2)


@pytest.mark.parametrize(
    ("specs", "written", "error"),
    [
        ({"a": SPEC}, [("b", OK)], KeyError),
        ({"a": SPEC}, [("a", torch.zeros(3))], AssertionError),
        ({"a": SPEC}, [("a", OK.half())], AssertionError),
        ({"a": SPEC, "b": SPEC}, [("a", OK)] * 2, KeyError),
        ({"a": SPEC, "b": SPEC}, [("a", OK)], AssertionError),
        ({"a": Spec(torch.complex128, [2])}, [], ValueError),
    ],
)
def test_each_tensor_once_and_as_announced(tmp_path, specs, written, error):
    def write():
        with TensorFile(tmp_path / "a", specs) as file:
            for name, tensor in written:
                file.write(name, tensor)

    with pytest.raises(error):
        write()


def header(value):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


def tensor(shape=(2,), place=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": place}


def test_files_of_the_library_are_read(tmp_path):
    tensors = {f"t{i}": torch.arange(3 * i).to(dtype) for i, dtype in enumerate(DTYPE_NAMES)}
    tensors["scalar"] = torch.tensor(2.0)
    save_file(tensors, tmp_path / "a", {"format": "pt"})
    with open(tmp_path / "a", "rb") as file:
        found = read_header(file.fileno())
    raw = (tmp_path / "a").read_bytes()
    assert found.keys() == tensors.keys()
    for key, (dtype, shape, (start, stop)) in found.items():
        value = load_file(tmp_path / "a")[key]
        assert (dtype, shape) == (DTYPE_NAMES[value.dtype], tuple(value.shape))
        assert raw[start:stop] == value.view(-1).view(torch.uint8).numpy().tobytes()
    assert parse_header(header({})) == {}
    empty = header({"__metadata__": {"format": "pt"}, "a": tensor((0, 3), (0, 0))})
    assert parse_header(empty) == {"a": Stored("F32", (0, 3), Place(len(empty), len(empty)))}


@sweep(
    ("head", "problem"),
    [
        (b"", "a header of 0 bytes instead of 0 - 8"),
        (header({})[:-1], "a header of 2 bytes instead of 9 - 8"),
        ((1 << 60).to_bytes(8, "little") + b"{}", f"a header of {1 << 60} bytes instead of 10 - 8"),
        (header(b"{"), "its header is not JSON"),
        (header(b"[]"), "its header is not a JSON object but list"),
        (header(b"[" * 10**5), "its header is not valid JSON: nested too deeply"),
        (header({"a": []}), "tensor 'a' without dtype, shape and place"),
        (header({"a": tensor(dtype="F8")}), "tensor 'a' without dtype, shape and place"),
        (header({"a": tensor(place=[0, 7])}), r"tensor 'a' of F32\[2\] at \[0, 7\]"),
    ],
)
def test_nonsense_is_refused(head, problem):
    with pytest.raises(ValueError, match=problem):
        parse_header(head)


def test_a_file_of_another_size_than_its_header_says(tmp_path):
    save_file({"a": torch.zeros(4)}, tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    problems = {
        whole[:-1]: f"{len(whole) - 1} bytes instead of {len(whole)}",
        whole + b"\0": f"{len(whole) + 1} bytes instead of {len(whole)}",
        whole[:20]: "a header of .* bytes in a file of 20",
        whole[:5]: "a header of .* bytes in a file of 5",
        (1 << 40).to_bytes(8, "little") + whole[8:]: f"a header of {1 << 40} bytes in a file",
    }
    for content, problem in problems.items():
        (tmp_path / "a").write_bytes(content)
        with open(tmp_path / "a", "rb") as file, pytest.raises(ValueError, match=problem):
            read_header(file.fileno())


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    save_file({"a": torch.zeros(4)}, tmp_path / "a")
    with open(tmp_path / "a", "r+b") as file:
        known = os.fstat(file.fileno())
        file.truncate(20)
        monkeypatch.setattr("fastpar.files.tensor_file.os.fstat", lambda _: known)
        with pytest.raises(OSError, match="ends at byte 20"):
            read_header(file.fileno())
