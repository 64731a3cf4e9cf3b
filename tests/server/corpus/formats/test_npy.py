"""NPY files: what numpy writes is read; every contradiction is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from corpus_server.errors import UnreadableCorpus
from tests.corpora import recognise, write_npy


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_reads_what_numpy_writes(tmp_path: Path, dtype: str, count: int) -> None:
    path = write_npy(tmp_path / "a.npy", np.arange(count), dtype=dtype)
    layout = recognise(path)
    assert (layout.format, layout.dtype, layout.num_tokens) == ("npy", np.dtype(dtype), count)
    assert layout.runs[0].data_offset == path.stat().st_size - layout.num_tokens * layout.dtype.itemsize


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_reads_every_version(tmp_path: Path, version: tuple[int, int]) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, np.arange(5, dtype="<u2"), version=version)
    layout = recognise(tmp_path / "a.npy")
    assert layout.num_tokens == 5
    assert np.fromfile(tmp_path / "a.npy", "<u2", offset=layout.runs[0].data_offset).tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), "<u2"), r"1-D .* got shape \(2, 3\); .*reshape"),
        (np.zeros((), "<u2"), r"1-D .* got shape \(\)"),
        (np.zeros(3, ">u2"), "little-endian .*'>u2'"),
        (np.zeros(3, "<i8"), r"'<i8'; .*astype\('uint32'\)"),
        (np.zeros(3, "<i2"), "'<i2'"),
        (np.zeros(3, "<f4"), "'<f4'"),
        (np.zeros(3, "<f8"), "'<f8'"),
        (np.zeros(3, [("a", "<u2")]), r"\('a', '<u2'\)"),
    ],
    ids=["2d", "0d", "big-endian", "int64", "int16", "float", "double", "structured"],
)
def test_refuses_other_arrays(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(UnreadableCorpus, match=message):
        recognise(tmp_path / "a.npy")


def test_refuses_an_array_cut_or_grown_at_any_byte(tmp_path: Path) -> None:
    whole = write_npy(tmp_path / "whole.npy", [1, 2, 3]).read_bytes()
    for length in [*range(6, len(whole)), len(whole) + 1, len(whole) + 2]:
        (tmp_path / "a.npy").write_bytes((whole + b"\0\0")[:length])
        with pytest.raises(UnreadableCorpus, match=r"copy|NPY"):
            recognise(tmp_path / "a.npy")


def _with_header(text: bytes, *, version: int = 1, length: int | None = None) -> bytes:
    size = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + size.to_bytes(2 if version == 1 else 4, "little") + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_with_header(b"{'descr': '<u2', 'fortran_order': True, 'shape': (0,)}"), "Fortran order"),
        (_with_header(b"{'descr': '<u2', 'fortran_order': False, 'shape': (-1,)}"), r"shape \(-1,\)"),
        (_with_header(b"{'descr': '<u2', 'fortran_order': False, 'shape': (True,)}"), r"shape \(True,\)"),
        (_with_header(b"{'descr': 'what', 'fortran_order': False, 'shape': (0,)}"), "'what'"),
        (_with_header(b"{'descr': "), "damaged"),
        (_with_header(b"__import__('os').getcwd()"), "damaged"),
        (_with_header(b"{[]: 1}"), "damaged"),
        (_with_header(b"[]"), "not a dict"),
        (_with_header(b"{}", version=9), "version 9 is unknown"),
        (_with_header(b"[" * 9000), "damaged"),
        (_with_header(b"{'descr': ('", version=2), "damaged"),
        (_with_header(b" " * 20_000, version=2), "damaged"),
        (_with_header(b"{}", version=2, length=2**32 - 1), "damaged"),
    ],
)
def test_refuses_damaged_headers(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(UnreadableCorpus, match=message):
        recognise(tmp_path / "a.npy")
