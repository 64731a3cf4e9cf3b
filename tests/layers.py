"""Layers of a package: which module imports which, the level of each, and what the docs say of them."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from traceback import walk_stack
from types import FrameType, SimpleNamespace

from tests.serving import environment

Levels = tuple[set[str], ...]
"""Layers from the ground up. Layers on one level do not know each other."""


def packages(package: Path) -> list[str]:
    """Return the dotted names of a package and of all packages in it."""
    return sorted(
        ".".join(path.parent.relative_to(package.parent).parts) for path in package.rglob("__init__.py")
    )


def module_of(path: str) -> str:
    """Return the dotted name of a file below the package, without the package's own name."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(package: Path) -> dict[str, set[str]]:
    """Return what every module imports of its package, also for types and inside functions."""
    sources = {
        module_of(path.relative_to(package).as_posix()): ast.parse(path.read_text())
        for path in package.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for name, tree in sources.items():
        found[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package.name:
                parent = (node.module or "").partition(".")[2]
                for alias in node.names:
                    inner = f"{parent}.{alias.name}".lstrip(".")
                    found[name].add(inner if inner in sources else parent or "__init__")
    return found


def layer(module: str, levels: Levels) -> str:
    """Return the layer of a module: the longest name in `levels` that is the module or a folder around it."""
    layers = [name for names in levels for name in names if f"{module}.".startswith(f"{name}.")]
    if not layers:
        raise AssertionError(f"{module} lies in no layer; add it to LEVELS")
    return max(layers, key=len)


def level(module: str, levels: Levels) -> int:
    """Return the number of the level that a module lies on."""
    (number,) = [number for number, layers in enumerate(levels) if layer(module, levels) in layers]
    return number


def wrong_imports(package: Path, levels: Levels) -> list[str]:
    """Return each import from a layer that is not below, and modules that import each other in a circle.

    A package's `__init__` imports its modules; a module that imported it back would make a circle.
    """
    found = imports(package)
    wrong = [
        f"{name} imports {other}"
        for name, others in found.items()
        for other in others
        if layer(other, levels) != layer(name, levels) and level(other, levels) >= level(name, levels)
    ]
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        wrong.append(f"a circle: {' -> '.join(error.args[1])}")
    return wrong


def modules(package: Path, levels: Levels, layers: Iterable[str]) -> list[str]:
    """Return the importable modules of some layers."""
    return sorted(f"{package.name}.{name}" for name in imports(package) if layer(name, levels) in layers)


@cache
def loaded_by(statements: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after some statements."""
    code = f"{statements}\nimport sys\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    return set(done.stdout.split())


def loaded_by_command(*words: str) -> set[str]:
    """Return the modules that `corpus-client` has loaded when it ends."""
    return loaded_by(f"""
import contextlib, io, sys
from corpus_client.__main__ import main
sys.argv = ["corpus-client", *{words!r}]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
""")


def chapter(page: str, heading: str) -> str:
    """Return a chapter of a page."""
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@contextmanager
def entered(package: Path) -> Iterator[SimpleNamespace]:
    """Collect the functions of a package that are called while `recording` is true.

    Threads are observed that start inside the block.

    Yields:
        An object with `recording`; `functions`, each a file and a line, without comprehensions; and `depth`,
        the most of them that were called by one another.
    """
    way = SimpleNamespace(recording=False, functions=set[tuple[str, int]](), depth=0)

    def note(frame: FrameType, event: str, argument: object) -> None:
        if not way.recording or event != "call" or frame.f_code.co_name.startswith("<"):
            return
        if (path := Path(frame.f_code.co_filename)).is_relative_to(package):
            way.functions.add((path.relative_to(package).as_posix(), frame.f_code.co_firstlineno))
            codes = [each.f_code for each, _ in walk_stack(frame)]
            names = (each.co_filename for each in codes if not each.co_name.startswith("<"))
            way.depth = max(way.depth, sum(Path(each).is_relative_to(package) for each in names))

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield way
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
