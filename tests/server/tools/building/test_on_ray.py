"""A build on Ray: the same bytes as with local processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.server.tools.building.faults import build
from tests.server.tools.building.sources import content, texts, write_jsonl
from tests.serving import environment

RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all of Ray's processes listen on loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    # Without these, Ray would write a token of its own into the user's home.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "of-this-test",
}

SCRIPT = """
import sys
import psutil, ray
import corpus_server.tools.building.sources as sources
from corpus_server.tools.building.driver import build, choose_options
from corpus_server.tools.building.running import in_processes, on_ray
from functools import partial
from pathlib import Path

source, bad, out, temporary = sys.argv[1:]
sources.PART_BYTES = 20_000
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=temporary)
children = psutil.Process().children(recursive=True)
listening = {
    each.laddr.ip
    for process in [psutil.Process(), *children]
    for each in process.net_connections("tcp")
    if each.status == "LISTEN"
}
assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}, listening
options = choose_options(tokenizer="bytes", eot=None)
build([source], Path(out) / "ray", options, on_ray)
try:
    build([bad], Path(out) / "bad", options, on_ray)
except Exception as error:
    print(type(error).__name__, error)
assert ray.is_initialized()
ray.shutdown()
build([source], Path(out) / "local", options, partial(in_processes, num_processes=2))
for each in psutil.wait_procs(children, timeout=20)[1]:  # Ray's own workers: some take minutes
    each.kill()
"""


def test_a_build_without_a_cluster_names_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    source = write_jsonl(tmp_path / "a.jsonl", texts(3, most_words=200))
    refused = build(source, tmp_path / "out", "--tokenizer", "bytes", "--ray", RAY_TMPDIR=str(tmp_path))
    assert refused.returncode == 2
    assert "error: expected a Ray cluster: " in refused.stderr
    assert "set RAY_ADDRESS" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_two_ray_workers_give_the_bytes_of_local_processes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    source = write_jsonl(tmp_path / "a.jsonl", texts(300, most_words=200))
    bad = write_jsonl(tmp_path / "bad.jsonl", texts(300, most_words=200))
    bad.write_text(bad.read_text() + "{")
    # Ray makes sockets in it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray") as temporary:
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, source, bad, tmp_path, temporary],
            capture_output=True,
            text=True,
            env=environment(**RAY),
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    assert content(tmp_path / "ray") == content(tmp_path / "local")
    assert "UnreadableCorpus" in ended.stdout
    assert "line 301: is not JSON" in ended.stdout
