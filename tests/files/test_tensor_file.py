"""safetensors files written in pieces: the same bytes, and nothing that was not announced."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastpar.files.dtypes import DTYPE_NAMES
from fastpar.files.tensor_file import Spec, TensorFile


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
    tensors = some_tensors()
    with TensorFile(tmp_path / "a", specs_of(tensors), metadata) as file:
        for name in list(tensors)[::order]:
            file.write(name, tensors[name])
    save_file(tensors, tmp_path / "b", metadata=metadata)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_strides_and_an_empty_end_are_no_matter(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.zeros(0, dtype=torch.uint8)}
    with TensorFile(tmp_path / "a", specs_of(tensors)) as file:
        for name in ("b", "a"):
            file.write(name, tensors[name])
    assert torch.equal(load_file(tmp_path / "a")["a"], tensors["a"])
    with TensorFile(tmp_path / "none", {}):
        pass
    assert load_file(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("b", torch.zeros(2), r"expected one of the others, got 'b' of dtype=torch.float32"),
        (
            "a",
            torch.zeros(3),
            r"expected Spec\(dtype=torch.float32, shape=\[2\]\), got 'a' .*=\[3\]",
        ),
        ("a", torch.zeros(2).half(), r"got 'a' of dtype=torch.float16, shape=\[2\]; write each"),
    ],
)
def test_what_was_not_announced_is_refused(tmp_path, name, tensor, message):
    with (
        pytest.raises(ValueError, match=f"TensorFile.write: .*{message}"),
        TensorFile(tmp_path / "a", {"a": Spec(torch.float32, [2])}) as file,
    ):
        file.write(name, tensor)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "a"], r"TensorFile.write: expected one of the others, got 'a'"),
        (["a"], r"TensorFile: expected all of 2 tensors, got none for 'b'; write each tensor once"),
    ],
)
def test_each_tensor_once(tmp_path, names, message):
    def write():
        with TensorFile(tmp_path / "a", dict.fromkeys("ab", Spec(torch.float32, [2]))) as file:
            for name in names:
                file.write(name, torch.zeros(2))

    with pytest.raises(ValueError, match=message):
        write()


def test_a_dtype_that_the_format_lacks(tmp_path):
    with pytest.raises(ValueError, match=r"a dtype of safetensors, got dtype=torch.complex64 for"):
        TensorFile(tmp_path / "a", {"a": Spec(torch.complex64, [2])})
