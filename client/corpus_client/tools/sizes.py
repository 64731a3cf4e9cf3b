"""Sizes as people write them: `4KiB`, `64 MB`."""

from __future__ import annotations

import re

from corpus_client import errors

UNITS = {
    "": 1, "B": 1,
    "kB": 1000, "MB": 1000**2, "GB": 1000**3,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
}  # fmt: skip

SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))

LEAST, MOST = 64, 64 << 30


def parse_size(text: str) -> int:
    """Bytes of one size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    spelled = {unit.lower(): factor for unit, factor in UNITS.items()}
    if match is None or match[2].lower() not in spelled:
        raise errors.InvalidArgument(
            f"a size must be a number and one of B, kB, MB, GB, KiB, MiB, GiB, got {text!r}"
        )
    size = float(match[1]) * spelled[match[2].lower()]
    if not LEAST <= size <= MOST or size != int(size):
        raise errors.InvalidArgument(f"a size must be whole bytes in [{LEAST}, 64GiB], got {text!r}")
    return int(size)


def parse_sizes(text: str) -> list[int]:
    """Bytes of several sizes with commas between, smallest first."""
    return sorted({parse_size(part) for part in text.split(",")})


def size_name(num_bytes: float) -> str:
    """Short: `4 KiB`, `1.5 MiB`; the decimal unit where that is the rounder number."""
    for unit in ("GiB", "GB", "MiB", "MB", "KiB", "kB"):
        count = num_bytes / UNITS[unit]
        if 1 <= count < 1024 and round(count, 2) == count:
            return f"{count:g} {unit}"
    for unit in ("GiB", "MiB", "KiB"):
        if num_bytes >= UNITS[unit]:
            return f"{num_bytes / UNITS[unit]:.1f} {unit}"
    return f"{num_bytes:g} B"


def seconds_name(seconds: float) -> str:
    """Short, in the unit that fits: `1.2 us`, `35 ms`."""
    unit, factor = next((each for each in SECONDS if seconds >= each[1]), SECONDS[-1])
    count = seconds / factor
    return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
