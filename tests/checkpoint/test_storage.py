"""Tensors in safetensors files: any type and shape, read back by torch and by the safetensors library alike."""

import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drumline.checkpoint.parts import write_large
from drumline.checkpoint.storage import DTYPES, write_tensors
from drumline.errors import CheckpointError
from drumline.files.disk import file_sha256
from drumline.pieces.folders import read_tensors, stored_shapes


def silent(point: str) -> None:
    pass


def test_tensors_of_every_type_and_shape_come_back_bit_by_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bits = torch.randint(256, (3 * 5 * 8,), dtype=torch.uint8)
    tensors = {
        str(dtype).removeprefix("torch."): bits.view(dtype) if dtype != torch.bool else bits > 99 for dtype in DTYPES
    }
    tensors |= {
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "step/count": torch.tensor(7.0),
    }
    files = write_tensors(tensors, tmp_path, part=0, parts=1, reached=silent)
    assert sorted(files) == ["model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"]
    assert {n: (t.dtype, t.shape) for n, t in tensors.items()} == stored_shapes(tmp_path)
    other = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_tensors(other, tmp_path)
    library = {name: tensor for file in files for name, tensor in load_file(tmp_path / file).items()}
    for name, tensor in tensors.items():
        for back in (other[name], library[name]):
            assert back.dtype == tensor.dtype
            same = (back.contiguous().reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))
            assert torch.equal(*same), name


def test_the_hash_taken_while_writing_is_the_files(tmp_path: Path) -> None:
    files = write_tensors({"a": torch.rand(5_000_000)}, tmp_path, part=1, parts=3, reached=silent)
    ((name, facts),) = files.items()
    assert name == "model-00002-of-00003.safetensors"
    assert facts == {"bytes": (tmp_path / name).stat().st_size, "sha256": file_sha256(tmp_path / name)}


def test_a_small_part_of_a_checkpoint_is_written_with_little_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        write_large({"a": torch.rand(99)}, tmp_path, part=0, parts=2, state_bytes=1000, reached=silent)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_parts_are_read_as_one(tmp_path: Path) -> None:
    for part in range(3):
        write_tensors({f"t{part}": torch.full((2,), float(part))}, tmp_path, part=part, parts=3, reached=silent)
    tensors = {f"t{part}": torch.zeros(2) for part in range(3)}
    read_tensors(tensors, tmp_path)
    assert [tensor.tolist() for tensor in tensors.values()] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_a_write_that_fails_raises_what_the_disk_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="model-00001"):
        write_tensors({"a": torch.ones(1)}, tmp_path / "none", part=0, parts=1, reached=silent)


def test_a_tensor_that_is_not_there_or_of_another_shape_is_an_error_for_people(tmp_path: Path) -> None:
    write_tensors({"a": torch.ones(3)}, tmp_path, part=0, parts=1, reached=silent)
    for wanted, what in (
        ({"b": torch.ones(3)}, "b is missing"),
        ({"a": torch.ones(2, 3)}, r"shape \(3,\), not \(2, 3\)"),
    ):
        with pytest.raises(CheckpointError, match=what):
            read_tensors(wanted, tmp_path)


def test_a_file_is_the_header_and_the_tensors_bytes_wide_types_first(tmp_path: Path) -> None:
    write_tensors(
        {"b": torch.ones(2), "a": torch.zeros(1, dtype=torch.int64)}, tmp_path, part=0, parts=1, reached=silent
    )
    content = (tmp_path / "model-00001-of-00001.safetensors").read_bytes()
    header = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},'
        b'"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}'
    )
    header += b" " * (-len(header) % 8)
    assert content == len(header).to_bytes(8, "little") + header + bytes(8) + bytes.fromhex("0000803f") * 2


def test_files_that_are_no_safetensors_are_an_error_for_people(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="cannot be read"):
        stored_shapes(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors({"a": torch.ones(1)}, tmp_path)
