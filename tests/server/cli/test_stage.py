"""`corpus-server stage` fills the cache of a server, which then asks the bucket for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corpus_server.corpus.verify import record
from corpus_server.corpus_spec import CorpusSpec
from tests import stores
from tests.buckets import NAME, Bucket
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer, command, environment, run_here, wait_until
from tests.stores import Faults

pytest.importorskip("obstore")

NUM_SHARDS, SHARD_TOKENS, SEQ_LEN = 8, 50_000, 100
SHARD_BYTES = 2 * SHARD_TOKENS
SHARD_WINDOWS = (SHARD_TOKENS - 1) // SEQ_LEN
EXTENT_BYTES = 16_384
PLAN = {
    "seq_len": SEQ_LEN,
    "order": {"shuffle": {"block_windows": SHARD_WINDOWS, "group_blocks": 2}},
    "stages": [{"global_batch_size": 8, "mixture": {"web": 1.0}}],
}
GROUP_STEPS = 2 * SHARD_WINDOWS // 8
FILES = (f"web=s3://{NAME}/web", "--extent-bytes", str(EXTENT_BYTES))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    shards = {f"web/{n}.bin": some_tokens(SHARD_TOKENS, seed=n).tobytes() for n in range(NUM_SHARDS)}
    with Bucket(objects=dict(shards)) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    """The command line, but for the steps."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    return (*FILES, "--plan", str(tmp_path / "plan.json"), "--cache-dir", str(tmp_path / "cache"))


def staged(*words: str) -> tuple[dict[str, Any], str]:
    done = run_here("stage", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("recorded", [False, True])
def test_a_block_of_a_bounded_shuffle_is_fetched_without_its_neighbours(
    tmp_path: Path, bucket: Bucket, recorded: bool
) -> None:
    """Also where recorded hashes are beside the shards: those of 16 MiB would bring 32 MiB for each block."""
    folder = tmp_path / "large"
    folder.mkdir()
    tokens = some_tokens(24 << 20)
    write_raw(folder / "0.bin", tokens)
    if recorded:
        record(CorpusSpec.parse(str(folder)))
    bucket.objects.update({f"large/{each.name}": each.read_bytes() for each in folder.iterdir()})
    plan = {
        "seq_len": 2048,
        "order": {"shuffle": {"block_windows": 2**12 + 1, "group_blocks": 1}},
        "stages": [{"global_batch_size": 2**12 + 1, "mixture": {"large": 1.0}}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    words = (f"large=s3://{NAME}/large", "--plan", str(tmp_path / "plan.json"), "--steps", "0:1")
    found, _ = staged(*words, "--cache-dir", str(tmp_path / "cache"))
    used = 2 * 2048 * (2**12 + 1)
    assert used < found["fetched_bytes"] == found["num_bytes"] <= used + 2 * (2 << 20)


def test_a_server_asks_for_nothing_that_was_staged(
    tmp_path: Path, bucket: Bucket, words: tuple[str, ...]
) -> None:
    steps = ("--steps", f"0:{GROUP_STEPS}")
    dry, said = staged(*words, *steps, "--dry-run")
    assert dry["num_bytes"] == dry["missing_bytes"] > SHARD_BYTES
    assert dry["fetched_bytes"] == 0
    assert not list((tmp_path / "cache" / "extents").iterdir())
    assert f"steps 0:{GROUP_STEPS} read {dry['num_extents']} extent" in said
    first, _ = staged(*words, *steps)
    assert first["fetched_bytes"] == dry["missing_bytes"]
    again, _ = staged(*words, *steps)
    assert (again["missing_bytes"], again["fetched_bytes"]) == (0, 0)
    arguments = ("--cache-dir", str(tmp_path / "cache"), "--extent-bytes", str(EXTENT_BYTES))
    with RunningServer({"web": f"s3://{NAME}/web"}, tmp_path, arguments=arguments) as server:
        plan = server.post_plan(PLAN).json()["id"]
        bucket.fault = Faults(stores.unavailable)
        for step in range(0, GROUP_STEPS, 7):
            assert server.get("/v1/batches", plan=plan, step=step).status == 200


def test_one_that_was_killed_goes_on(bucket: Bucket, tmp_path: Path, words: tuple[str, ...]) -> None:
    bucket.bytes_per_second = 200_000.0
    process = subprocess.Popen(command("stage", *words, "--steps", f"0:{GROUP_STEPS}"), env=environment())
    extents = tmp_path / "cache" / "extents"
    wait_until(lambda: len(list(extents.glob("*/*/tokens"))) >= 3, "nothing is staged")
    process.kill()
    process.wait()
    bucket.bytes_per_second = None
    done, _ = staged(*words, "--steps", f"0:{GROUP_STEPS}")
    assert done["fetched_bytes"] == done["missing_bytes"] < done["num_bytes"]
    assert len(list(extents.glob("*/*/tokens"))) == done["num_extents"]
    assert not list(extents.glob("*/*/.*"))


def test_a_store_that_fails_for_a_moment_is_asked_again(bucket: Bucket, words: tuple[str, ...]) -> None:
    whole = staged(*words, "--steps", "0:1", "--dry-run")[0]
    faults = Faults(stores.cut, most=5)
    of_extent = lambda reply: len(reply.body) == EXTENT_BYTES  # noqa: E731
    bucket.fault = lambda path, reply: faults(path, reply) if of_extent(reply) else None
    done, _ = staged(*words, "--steps", "0:1")
    assert faults.num_met == 5
    assert done["fetched_bytes"] >= whole["missing_bytes"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--steps", "5:5"), "FIRST below STOP"),
        (("--steps", f"0:{GROUP_STEPS}", "--cache-bytes", "100000"), "name fewer steps"),
        (("--steps", "0:1", "--extent-bytes", "5"), "extent_bytes"),
    ],
)
def test_mistakes_are_one_line(
    bucket: Bucket, words: tuple[str, ...], more: tuple[str, ...], said: str
) -> None:
    words = (*words[:1], *words[3:]) if "--extent-bytes" in more else words  # as FILES has them
    done = run_here("stage", *words, *more)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(("permissions", "umask"), [(0o2770, 0o077), (0o700, 0o022)])
@pytest.mark.usefixtures("bucket")
def test_what_is_staged_has_the_permissions_of_the_cache_folder(
    tmp_path: Path, words: tuple[str, ...], permissions: int, umask: int
) -> None:
    """Servers of several users share a folder of their group, whatever their umasks."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(permissions)
    done = subprocess.run(
        command("stage", *words, "--steps", "0:10"),
        env=environment(),
        umask=umask,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = list(folder.rglob("*"))
    assert {each.name for each in made} >= {"lock", "limit", "boot", "tokens", "0.bin"}
    for each in made:
        expected = permissions & (0o777 if each.is_dir() else 0o666)
        assert each.stat().st_mode & 0o777 == expected, each


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("closed", ["lock", "extents/*/*"])
@pytest.mark.usefixtures("bucket")
def test_what_another_user_keeps_to_himself_is_named(closed: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # that of pytest is root's alone
        (folder := Path(name, "cache")).mkdir()
        folder.chmod(0o777)
        (plan := Path(name, "plan.json")).write_text(json.dumps(PLAN))
        words = (*FILES, "--plan", str(plan), "--cache-dir", str(folder), "--steps", "0:1")
        staged(*words)
        for each in folder.glob(closed):
            each.chmod(0o700)
        become = "import os, corpus_server.cli.stage, obstore; os.seteuid(65534)"
        done = subprocess.run(
            command("stage", *words, prelude=become),
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        assert f"Permission denied: {folder}/{closed.partition('*')[0]}" in done.stderr
        assert "another user" in done.stderr
        assert "make room" not in done.stderr
