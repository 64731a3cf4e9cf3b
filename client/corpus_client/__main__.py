"""Run the `corpus-client` command, or say which extras of the package it lacks."""

from __future__ import annotations

import sys
from importlib.util import find_spec

EXTRAS = {"typer": "tools", "rich": "tools"}
"""What all commands import, and which extra of `corpus-client` installs it."""
WITH_TORCH = {"torch": "torch"}
"""What those import, too, that measure `CorpusLoader`."""
MEASURING = ("bench", "doctor", "transfer")


def main() -> None:
    """Enter the command; end with one sentence if packages of its extras are not installed."""
    # Options of the program itself take no value, so the first other word is the command.
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    needed = EXTRAS | WITH_TORCH if command in MEASURING else EXTRAS
    if missing := [name for name in needed if find_spec(name) is None]:
        extras = ",".join(dict.fromkeys(needed[name] for name in missing))
        sys.stderr.write(
            f"error: corpus-client needs {', '.join(missing)}, which {'are' if missing[1:] else 'is'} "
            f"not installed; pip install 'corpus-client[{extras}]'\n"
        )
        sys.exit(2)
    from corpus_client.tools.app import app

    app()


if __name__ == "__main__":
    main()
