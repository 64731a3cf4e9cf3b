"""Settings: every mistake is one sentence that names where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from corpus_server.cli import app
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter
from corpus_server.settings import EXPOSED, Settings, all_settings, default_state_dir

WEB = CorpusSpec(name="web", path=Path("/data/web"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"port": -1}, r"port must be in \[0, 65535\], got -1"),
        ({"port": 65536}, "got 65536"),
        ({"port": True}, "got True"),
        ({"port": 80.5}, "got 80.5"),
        ({"workers": 0}, r"workers must be in \[1, 256\]"),
        ({"max_response_bytes": 0}, "max_response_bytes"),
        ({"max_concurrent_responses": 0}, "max_concurrent_responses"),
        ({"send_timeout_seconds": 0}, "send_timeout_seconds"),
        ({"send_timeout_seconds": float("nan")}, "got nan"),
        ({"keep_alive_seconds": "75"}, "got '75'"),
        ({"log_level": "loud"}, "log_level must be one of critical, .*debug, got 'loud'"),
        ({"host": 3}, "host must be a string, got 3"),
        ({"state_dir": "/s"}, "state_dir must be a path, got '/s'"),
        ({"workers": None}, "workers must be in .* got None"),
        ({"host": "0.0.0.0"}, "host 0.0.0.0 is reached from other machines, .*--allow-anyone"),
        ({"host": "nosuch.invalid"}, "host nosuch.invalid is no address, and no name that is known here"),
        ({"exposed": True}, "exposed is for servers that strangers reach, .*--allow-anyone"),
        ({"allow": "10.0.0.0/33"}, "allow must be networks .*, got '10.0.0.0/33'"),
        ({"allow": "127.0.0.1,10.0.0.1/8"}, "allow must be networks .*, got '10.0.0.1/8'"),
        ({"allow": "10.0.0.0/8,"}, "allow must be networks .*, got ''"),
        ({"allow": "corpus.local"}, "allow must be networks .*, got 'corpus.local'"),
        ({"allow": ["127.0.0.1"]}, "allow must be a string"),
        ({"tls_key": Path("k")}, "tls_certificate and tls_key belong together"),
        ({"tls_client_ca": Path("c")}, "tls_client_ca needs tls_certificate and tls_key"),
        ({"corpora": ()}, "no corpus to serve"),
        ({"corpora": (WEB, WEB)}, "two corpora are named 'web'"),
    ],
)
def test_values_outside_their_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        Settings(**{"corpora": (WEB,), **change})


def test_a_file_and_the_command_line(tmp_path: Path) -> None:
    """Paths of the file are relative to the file; the command line goes before it."""
    (tmp_path / "corpus.toml").write_text(
        'server = {port = 1, workers = 2, state_dir = "/s", send_timeout_seconds = 5}\n'
        '[corpora.web]\npath = "web"\ndtype = "uint32"\n'
        '[corpora.code]\npath = "/data/code"\ntokenizer = "bytes"\n'
    )
    other = CorpusSpec(name="other", path=Path("/o"))
    settings = Settings.read(tmp_path / "corpus.toml", corpora=(other,), port=9, host=None)
    assert settings == Settings(
        corpora=(
            CorpusSpec(name="web", path=tmp_path / "web", dtype="uint32"),
            CorpusSpec(name="code", path=Path("/data/code"), tokenizer="bytes"),
            other,
        ),
        port=9,
        workers=2,
        state_dir=Path("/s"),
        send_timeout_seconds=5,
    )


CORPUS = '[corpora.web]\npath = "/data"\n'
FILE_MISTAKES: list[tuple[str, bytes | str, str]] = [
    ("no-toml", "port: 8000", "cannot read"),
    ("no-utf8", b"\xff\xfe", "cannot read"),
    ("unknown-table", CORPUS + "[sever]\nport = 1", "unknown sever; known are corpora, server"),
    ("unknown-key", CORPUS + "[server]\nprot = 1", r"\[server\]: unknown prot; known are .*port"),
    ("unknown-corpus-key", CORPUS + 'dtpye = "uint8"', r"\[corpora\.web\]: unknown dtpye"),
    ("no-path", '[corpora.web]\ndtype = "uint8"', "path is missing"),
    ("server-no-table", "server = 3\n" + CORPUS, r"server.* must be a table"),
    ("corpora-no-table", "corpora = 3", r"corpora.* must be a table"),
    ("corpus-no-table", '[corpora]\nweb = "/data"', r"corpora\.web.* must be a table"),
    ("path-nul", '[corpora.web]\npath = "a\\u0000"', r"path must be a string, got 'a\\x00'"),
    ("path-number", "[corpora.web]\npath = 3", r"path must be a string, got 3"),
    ("eot-text", CORPUS + 'eot = "x"', r"\[corpora\.web\]: eot must be an id, 0 or more, got 'x'"),
    ("exclude-text", CORPUS + 'exclude = ""', r"exclude must be"),
    ("token-range", CORPUS + "token_range = [3, 2]", r"token_range must be start and stop, .* got \[3, 2\]"),
    ("state-dir-nul", CORPUS + '[server]\nstate_dir = "a\\u0000"', r"state_dir must be a path, got .*a\\x00"),
    ("uds-nul", CORPUS + '[server]\nuds = "a\\u0000"', r"uds must be a path, got .*a\\x00"),
    ("uds-empty", CORPUS + '[server]\nuds = ""', "uds must be a path, got ''"),
    ("state-dir-empty", CORPUS + '[server]\nstate_dir = ""', "state_dir must be a path, got ''"),
    ("nothing", "", "no corpus to serve"),
]


@pytest.mark.parametrize(
    ("content", "message"), [pytest.param(*mistake, id=name) for name, *mistake in FILE_MISTAKES]
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, content: bytes | str, message: str) -> None:
    path = tmp_path / "corpus.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidParameter, match=message) as caught:
        Settings.read(path)
    assert "\n" not in caught.value.detail


def test_the_state_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert default_state_dir() == Path("/x/corpus-server")
    assert Settings(corpora=(WEB,)).state_dir == Path("/x/corpus-server")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert default_state_dir() == Path("/h/.local/state/corpus-server")


def test_every_setting_is_an_option() -> None:
    options = {each for command in get_command(app).commands["serve"].params for each in command.opts}  # type: ignore[attr-defined]
    for setting in all_settings():
        assert f"--{setting.name.replace('_', '-')}" in options
        assert setting.help.endswith(".")


def test_an_exposed_server_has_strict_defaults(tmp_path: Path) -> None:
    """And whatever is said otherwise has priority, in the file or on the command line."""
    tokens = tmp_path / "tokens.toml"
    config = tmp_path / "corpus.toml"
    config.write_text('[server]\nexposed = true\nkeep_alive_seconds = 40\n[corpora.web]\npath = "web"\n')
    settings = Settings.read(config, tokens=tokens, max_connections=9)
    for name, value in EXPOSED.items():
        said = {"keep_alive_seconds": 40, "max_connections": 9}
        assert getattr(settings, name) == said.get(name, value)
    for name, value in EXPOSED.items():
        assert value < Settings.__dataclass_fields__[name].default
    with pytest.raises(InvalidParameter, match="no tokens are asked for"):
        Settings.read(config)
    assert Settings.read(config, allow_anyone=True).head_timeout_seconds == EXPOSED["head_timeout_seconds"]
