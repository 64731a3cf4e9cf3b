"""What a loader is given and takes for no path, or cannot serve from one, is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from corpus_client import (
    CorpusLoader,
    Network,
    Staging,
    errors,
)
from tests.contract.by_path.processes import Corpora, Runtime
from tests.contract.conftest import make_loader


def test_what_is_no_url_and_no_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    forms = r"url must be http://host:port, .*, \{'web': '/data/web', \.\.\.\}, got "
    for source, message in {
        "data": rf"{forms}'data', which is no URL and no file or folder in {tmp_path}",
        "web.bin": rf"{forms}'web.bin', which is no URL",
        "": rf"{forms}''",
        "ftp://data/web": rf"{forms}'ftp://data/web'",
    }.items():
        with pytest.raises(errors.InvalidArgument, match=message):
            make_loader(source)
    for given, message in (
        (
            ["/data/a", "/data/b"],
            r"a list must hold URLs of one server's replicas; several corpora go by name",
        ),
        (["http://data", Path("/data/b")], "a list must hold URLs"),
        ({}, "must name at least one corpus"),
        ({"a b": "/data"}, "corpora must be named by letters"),
        ({"a": 3}, "corpus 'a' must be a path, got 3"),
        (Path("/data\0web"), "a path must have no NUL"),
    ):
        with pytest.raises(errors.InvalidArgument, match=message):
            make_loader(given)  # type: ignore[arg-type]


def test_a_server_that_does_not_start_says_why(tmp_path: Path, runtime: Runtime) -> None:
    with pytest.raises(errors.ServerNotStarted, match=r"/none: expected a token file or a folder of shards"):
        make_loader(tmp_path / "none")
    (tmp_path / "corpus.toml").write_text('[server]\ntokens = "tokens.toml"\n[corpora.web]\npath = "web"\n')
    with pytest.raises(
        errors.ServerNotStarted, match="while_locked is for processes of this host, and tokens"
    ):
        make_loader(tmp_path / "corpus.toml")
    (tmp_path / "corpus.toml").write_text('[server]\nuds = "socket"\n[corpora.web]\npath = "web"\n')
    with pytest.raises(errors.InvalidArgument, match="must leave out uds, which loaders decide"):
        make_loader(tmp_path / "corpus.toml")


def test_options_that_are_for_servers_at_a_url_are_refused(corpora: Corpora, tmp_path: Path) -> None:
    path = corpora["web"].path
    for name, value in (("auth", "secret"), ("ca_file", "ca.pem"), ("cert_file", "cert.pem")):
        with pytest.raises(errors.InvalidArgument, match=f"{name}= is for a server at a URL") as caught:
            CorpusLoader(path, seq_len=16, global_batch_size=24, network=Network(**{name: value}))  # type: ignore[arg-type]
        assert "secret" not in str(caught.value)
    with pytest.raises(errors.InvalidArgument, match="local_root= is for a server at a URL"):
        CorpusLoader(path, seq_len=16, global_batch_size=24, staging=Staging(local_root=tmp_path))


def test_without_the_server_one_line_says_how(corpora: Corpora, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    with pytest.raises(
        errors.InvalidArgument, match="not installed here; pip install corpus-server, or give the URL"
    ):
        make_loader(corpora["web"].path)


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_another_system_is_refused(corpora: Corpora, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr("sys.platform", platform)
    with pytest.raises(errors.InvalidArgument, match=f"runs on Linux alone, got {platform}; give the URL"):
        make_loader(corpora["web"].path)


def test_a_folder_that_others_may_enter_is_refused(corpora: Corpora, runtime: Runtime) -> None:
    (runtime.folder / "corpus-server").mkdir(mode=0o755)
    with pytest.raises(
        errors.InvalidArgument, match="must be a folder of this user that nobody else may enter"
    ):
        make_loader(corpora["web"].path)
