"""`corpus-server token`: make an access token."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from corpus_server.admission.access import make_token, parse_tokens
from corpus_server.admission.request import SCOPES
from corpus_server.cli.common import AsJson, print_json, tell
from corpus_server.corpus.publish import publishing
from corpus_server.corpus_spec import NAME
from corpus_server.errors import InvalidParameter
from corpus_server.user_files import read_small_file, reason_of


def token(
    file: Annotated[Path, typer.Argument(help="File of tokens to add to; made if it does not exist.")],
    name: Annotated[str, typer.Argument(help="Who gets the token; appears in logs and metrics.")],
    scope: Annotated[
        list[str],
        typer.Option(help=f"read:CORPUS, read:*, {', '.join(SCOPES)}; may be given several times."),
    ],
    expires: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="Day (UTC) from which it is refused.")
    ] = None,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Responses under way per process.")] = None,
    max_bytes: Annotated[int | None, typer.Option(min=1, help="Bytes under way per process.")] = None,
    max_bytes_per_second: Annotated[int | None, typer.Option(min=1, help="Per process.")] = None,
    max_plans: Annotated[int | None, typer.Option(min=1, help="Plans that the server keeps.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make an access token, add its hash to a file, and print the token: it is shown this once.

    Example: corpus-server token tokens.toml training --scope read:fineweb --scope plans
    """
    if not NAME.fullmatch(name):
        raise InvalidParameter.expected("name", "1 to 128 letters, digits, '.', '_' or '-'", name)
    limits = {
        "max_requests": max_requests,
        "max_bytes": max_bytes,
        "max_bytes_per_second": max_bytes_per_second,
        "max_plans": max_plans,
    }
    until = None if expires is None else expires.replace(tzinfo=UTC)
    if until is not None and until <= datetime.now(UTC):
        raise InvalidParameter.expected("expires", "a day that is still to come", f"{until:%Y-%m-%d}")
    secret, table = make_token(name, scope, until, limits)
    try:
        before = read_small_file(file)[0] if file.exists() else ""
        if any(caller.name == name for caller in parse_tokens(before, file).values()):
            raise InvalidParameter(
                f"{file} has a token {name!r} already; give another name, or remove [tokens.{name}]",
                parameter="name",
            )
        text = before + ("\n" if before else "") + table
        parse_tokens(text, file)
        _replace(file, text)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(
            f"cannot add a token to {file}: {reason_of(error)}", parameter="file"
        ) from error
    if as_json:
        print_json({"name": name, "token": secret, "file": file, "scopes": scope, "expires": until})
        return
    tell(escape(f"added {name} to {file}; its token is on standard output and kept nowhere else"))
    print(secret)


def _replace(file: Path, text: str) -> None:
    """Write a file whole or not at all: a server may be reading it, and must be able to afterwards."""
    about = file.stat() if file.exists() else None
    with publishing(file) as out:
        os.fchmod(out.fileno(), 0o600 if about is None else about.st_mode & 0o777)
        if about is not None:
            os.fchown(out.fileno(), about.st_uid, about.st_gid)
        out.write(text.encode())
