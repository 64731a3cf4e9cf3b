"""Small files hold huge values: 256 MiB of metadata of a document, 200 names of a megabyte in a recording."""

from __future__ import annotations

from pathlib import Path

from scripts.benchmarks.questions import Peak
from scripts.drills_lib.drill import Found
from tests.metadata import write_metadata
from tests.recorded import Record, write_part
from tests.reference import one_source
from tests.serving import RunningServer
from tests.views import write_corpus

ROWS = (31, 47)
COUNT = "2 files, 4 questions"
SECONDS = 60
ORACLE = "the short columns of the same rows"
RULE = "the worker's memory grows by less than 100 MiB, and each response says what was not read"


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    corpus = write_corpus(folder / "web", [[3] * 4])
    text = ["short", "x" * (256 << 20), "short", "short"]
    write_metadata(corpus / "documents", {"id": ["a", "b", "c", "d"], "text": text}, compression="zstd")
    del text
    names = [f"{number:03}{'y' * (1 << 20)}" for number in range(200)]
    losses = folder / "losses"
    write_part(losses, [Record(number, 0, name, 1.0) for number, name in enumerate(names)], sources=["web"])
    del names
    sizes = [path.stat().st_size for path in (corpus / "documents").iterdir()]
    found.figure("metadata file, KiB", sum(sizes) / 1024, most=1024)
    arguments = ["--record-dir", str(losses)]
    with RunningServer({"web": f"{corpus},dtype=uint32"}, folder, arguments=arguments) as server:
        plan = server.post_plan(one_source("web", 2, 4)).json()["id"]
        targets = ["/v1/corpora/web/documents/1", "/v1/recordings", "/v1/recordings/losses/losses"]
        targets.append(f"/v1/plans/{plan}/rows?step=0&count=4&metadata=all")
        peak, said = Peak(server), ""
        for target in targets:
            response = server.get(target)
            found.expect(response.status == 200, f"{target}: {response.status} {response.body[:300]!r}")
            said += response.body.decode()
        found.figure("worker's memory, MiB more", peak.mib(), most=100)
    found.expect('"id":"b"' in said.replace(" ", ""), "the short column of the document is not there")
    found.expect("not read: " in said, "no response says that the value was not read")
