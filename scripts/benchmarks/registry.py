"""Which axes there are: the modules of a package, each complete by itself."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Protocol, cast

from scripts.benchmarks.report import Options, Report


class Axis(Protocol):
    """What a module of the package is."""

    HELP: str

    def measure(self, options: Options) -> Report:
        """Measure it once."""


def find_axes(package: ModuleType) -> dict[str, Axis]:
    """Return the axes of a package by name, in alphabetical order.

    Raises:
        TypeError: a module lacks a part.
    """
    axes = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        module = importlib.import_module(f"{package.__name__}.{name}")
        missing = [part for part in ("HELP", "measure") if not hasattr(module, part)]
        if missing:
            raise TypeError(f"{module.__name__} must have HELP and measure(options), it lacks {missing}")
        axes[name] = cast("Axis", module)
    return axes
