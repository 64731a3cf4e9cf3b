"""The options of `scripts/quickstart`; the standard library is enough to say what they are."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart",
        description="Build a corpus of real text, serve it, and train a small GPT from it over HTTP. "
        "Installs what that takes into .venv first.",
    )
    parser.add_argument("--seconds", type=float, default=60, help="train for so long (default: 60)")
    parser.add_argument("--steps", type=int, help="train up to this step instead")
    parser.add_argument("--corpus-mb", type=int, default=12, help="megabytes of text, 1 to 30 (default: 12)")
    parser.add_argument("--port", type=int, default=0, help="of the server (default: one that is free)")
    parser.add_argument("--keep-serving", action="store_true", help="go on serving until Ctrl-C")
    parser.add_argument("--fresh", action="store_true", help="forget what was trained before")
    args = parser.parse_args()
    for name, least, most in (
        ("seconds", 1, None),
        ("steps", 1, None),
        ("corpus_mb", 1, 30),
        ("port", 0, 65535),
    ):
        value = getattr(args, name)
        if value is not None and (value < least or (most is not None and value > most)):
            accepted = f"at least {least}" if most is None else f"in [{least}, {most}]"
            parser.error(f"--{name.replace('_', '-')} must be {accepted}, got {value:g}")
    from scripts.quickstart_lib import tour  # needs what scripts/quickstart installs

    return tour.run(**vars(args))


if __name__ == "__main__":
    sys.exit(main())
