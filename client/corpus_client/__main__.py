"""Run the `corpus-client` command, or say which extras of the package it lacks."""

from __future__ import annotations

import sys
from importlib.util import find_spec

EXTRAS = {"typer": "tools", "rich": "tools", "torch": "torch", "threadpoolctl": "torch"}
"""What the commands import, and which extra of `corpus-client` installs it."""


def main() -> None:
    """Enter the command; end with one sentence if packages of its extras are not installed."""
    if missing := [name for name in EXTRAS if find_spec(name) is None]:
        extras = ",".join(dict.fromkeys(EXTRAS[name] for name in missing))
        sys.exit(
            f"corpus-client: the command needs {', '.join(missing)}, which {'are' if missing[1:] else 'is'} "
            f"not installed; pip install 'corpus-client[{extras}]'"
        )
    from corpus_client.tools.app import app

    app()


if __name__ == "__main__":
    main()
