"""`corpus-client transfer`: what copies cost on this machine, from page to page and over the bus."""

from __future__ import annotations

from typing import Annotated

import typer

from corpus_client.tools import report

SIZES = "4KiB,64KiB,1MiB,4MiB,16MiB,64MiB,256MiB"


def transfer(
    sizes: Annotated[str, typer.Option(help="of the copies, with commas between")] = SIZES,
    repeats: Annotated[int, typer.Option(help="of each measurement, unless it takes 2 s", min=3)] = 20,
    device: report.Device = None,
    as_json: report.AsJson = False,
) -> None:
    """Measure copies: within host memory, to the GPU from each kind of memory, within it, and back.

    Example: corpus-client transfer --sizes 1MiB,64MiB --device cuda
    """

    def measured() -> report.Report:
        from corpus_client.staging.ring import find_device
        from corpus_client.tools.copies import measure
        from corpus_client.tools.timing import parse_size

        place = find_device(device)
        return measure(place, sorted(set(map(parse_size, sizes.split(",")))), repeats)

    report.run(measured, as_json=as_json)
