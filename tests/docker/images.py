"""What the Dockerfiles say, and the command line of the worker's image."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location

from tests.serving import ROOT

DOCKER = ROOT / "docker"


def image_environment(name: str) -> dict[str, str]:
    """Return the variables of an image that decide where programs keep files."""
    return dict(re.findall(r"\b(XDG_\w+)=(\S+)", (DOCKER / name).read_text()))


def image_user(name: str) -> int:
    """Return the number of the user that an image runs as."""
    (user,) = re.findall(r"^USER (\d+):\1$", (DOCKER / name).read_text(), re.MULTILINE)
    return int(user)


def worker_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what the training example reads from a command line; an unknown flag ends it."""
    spec = spec_from_file_location("train", ROOT / "client" / "examples" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    parsed: argparse.Namespace = module.parse_arguments(list(arguments))
    return parsed
