"""A part of some files is trained on like any corpus: over the wire and from a local copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.contract.conftest import make_loader, take
from tests.corpora import write_llmc, write_raw
from tests.serving import RunningServer


def test_a_token_range_of_a_split_is_the_same_from_a_local_copy(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    tokens = np.arange(60_000)
    write_raw(folder / "a_train_1.bin", tokens[:1000])
    write_llmc(folder / "a_train_2.bin", tokens[1000:3000])
    write_raw(folder / "a_train_3.bin", tokens[3000:6000])
    write_raw(folder / "a_val.bin", tokens[6000:])
    chosen = f"web={folder}#train,token_range=1500,4000,eot=1700"
    with RunningServer({}, tmp_path, arguments=[chosen]) as server:
        with make_loader(server.url, ignore_index=-100) as loader:
            remote = take(loader, 20)
            masked = next(loader)
        assert (masked.targets == -100).sum() == (masked.inputs == 1700).sum()
        with make_loader(server.url, local_root=folder) as loader:
            local = take(loader, 20)
    for (step, one), (same_step, other) in zip(remote, local, strict=True):
        assert step == same_step
        np.testing.assert_array_equal(one, other)
        assert 1500 <= one.min() <= one.max() < 4000
        assert (np.diff(one) == 1).all()
