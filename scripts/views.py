"""Measure views of a corpus of many documents: creating, opening, first batch, difference.

    nice python scripts/views.py FOLDER [--documents 100000000]

FOLDER takes 4 GB for 10^8 documents; tokens are holes of sparse files. Each part is a process of its own, and
its peak memory is what the system says. DuckDB's own time is that of the same query, as a count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import xxhash

NUM_SHARDS = 10
WHERE = "score >= 0.6 and lang = 'en'"
REPEAT = "case when score >= 0.9 then 2 else 1.5 end"


def make(folder: Path, num_documents: int) -> None:
    """Write shards of holes, their document ends, and five columns."""
    import duckdb

    from corpus_server.corpus.formats.documents import DocumentsHeader, documents_path
    from corpus_server.corpus.shards import content_digest, open_runs

    (folder / "web" / "documents").mkdir(parents=True)
    draw, per_shard = np.random.default_rng(0), num_documents // NUM_SHARDS
    for number in range(NUM_SHARDS):
        lengths = draw.lognormal(6.0, 1.0, per_shard).astype(np.int64).clip(2, 100_000)
        ends = lengths.cumsum().astype("<u8")
        path = folder / "web" / f"{number}.bin"
        with path.open("wb") as file:
            os.truncate(file.fileno(), 2 * int(ends[-1]))
        runs = open_runs(path, sidecar=False)
        digest = xxhash.xxh3_64_intdigest(ends.data)
        header = DocumentsHeader(0, int(ends[-1]), per_shard, runs[0].dtype, content_digest(runs), digest)
        documents_path(path).write_bytes(header.pack() + ends.tobytes())
        runs[0].close()
        query = f"""
            COPY (
                SELECT {number * per_shard} + i AS id, 'https://host-' || hash(i) % 100000 || '/' || i AS url,
                    (hash(i + {number}) % 1000000)::DOUBLE / 1e6 AS score,
                    ['en', 'de', 'fr', 'es'][1 + (hash(i * 7) % 4)::INT] AS lang,
                    (hash(i * 13 + {number}) % {num_documents // 2})::BIGINT AS cluster
                FROM range({per_shard}) AS t(i)
            ) TO '{folder}/web/documents/{number}.parquet' (FORMAT parquet)
        """
        connection = duckdb.connect()
        connection.execute("SET memory_limit = '1GB'")
        connection.execute(query)
        connection.close()


def query(folder: Path, text: str) -> None:
    """Run a query of DuckDB's own, with the memory that views give it."""
    import duckdb

    connection = duckdb.connect()
    connection.execute("SET memory_limit = '1GB'")
    connection.execute(f"SET temp_directory = '{folder}/spill'")
    connection.execute(text.format(files=f"read_parquet('{folder}/web/documents/*.parquet')")).fetchall()


def read(folder: Path) -> None:
    """Open a view, read a first batch and later ones, and compare two views."""
    from corpus_server.catalog import Catalog
    from corpus_server.corpus_spec import CorpusSpec
    from corpus_server.plan import Plan
    from corpus_server.plan.questions.diff import compare_slices
    from corpus_server.plan.questions.slices import finish
    from corpus_server.read.changes import view_changes
    from corpus_server.read.reading import WindowReading, read_arrays

    found: dict[str, float] = {}
    times = [time.perf_counter()]

    def timed() -> float:
        times.append(time.perf_counter())
        return round(times[-1] - times[-2], 4)

    specs = [f"{folder}/web,eot=0", f"hq=web?view={folder}/where.view", f"rep=web?view={folder}/repeat.view"]
    specs.append(f"less=web?view={folder}/without.view")
    catalogs = [Catalog.open([CorpusSpec.parse(text)]) for text in specs[:1]]
    found["open the corpus"] = timed()
    catalogs.append(Catalog.open(map(CorpusSpec.parse, specs)))
    found["open the corpus and three views"] = timed()
    plans = {}
    for name in ("web", "hq", "rep", "less"):
        stage = {"from_step": 0, "global_batch_size": 512, "mixture": {name: 1}}
        bound = plans[name] = catalogs[1].bind(Plan.from_json({"seq_len": 2048, "stages": [stage]}))
        for step in (0, 1, 2, 3):
            for array in read_arrays(WindowReading(bound, step=step, count=1, rank=0, rows=512)):
                del array
            found[f"{name}: 512 x 2049, step {step}"] = timed()
        bound.sampler.pieces(9, range(512))
        found[f"{name}: places of step 9"] = timed()
        pieces, borders = bound.sampler.pieces(9, range(512))
        found[f"{name}: pieces of a row"] = len(pieces) / (len(borders) - 1)
        timed()
    finish(view_changes(plans["hq"], plans["less"]))
    found["documents that differ, of two views"] = timed()
    compared = finish(compare_slices(plans["hq"].sampler, plans["less"].sampler, num_steps=1))
    found["first step that differs"] = timed()
    found["it is"] = compared.first_step or 0
    print(json.dumps(found, indent=1))


def part(name: str, *command: str) -> None:
    """Run a part in a process of its own, and say its time and its peak memory."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command])
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    cpu = used.ru_utime + used.ru_stime
    print(
        f"{name}: {seconds:.1f} s, CPU {cpu:.1f} s, peak {used.ru_maxrss / 2**20:.2f} GiB, status {status}",
        flush=True,
    )


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=10**8)
    parser.add_argument("--part", nargs="+")
    given = parser.parse_args()
    folder = given.folder.absolute()
    if given.part:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        {"make": lambda: make(folder, given.documents), "read": lambda: read(folder)}.get(
            given.part[0], lambda: query(folder, given.part[1])
        )()
        return
    own = [__file__, str(folder), "--documents", str(given.documents), "--part"]
    part("make", *own, "make")
    counted = f"SELECT count(*) FROM {{files}} WHERE {WHERE}"
    summed = f"SELECT sum({REPEAT}) FROM {{files}} WHERE {WHERE}"
    firsts = "SELECT count(*) FROM (SELECT cluster, min(id) FROM {files} GROUP BY cluster)"
    (folder / "gone.txt").write_text(
        "".join(f"{n}\n" for n in range(5, given.documents, given.documents // 1000))
    )
    create = ["-m", "corpus_server", "view", "create", f"{folder}/web,eot=0", "--out"]
    gone = ["--without", str(folder / "gone.txt")]
    part("DuckDB: where", *own, "query", counted)
    part("view: where", *create, f"{folder}/where.view", "--where", WHERE)
    part("DuckDB: where and repeat", *own, "query", summed)
    part("view: where and repeat", *create, f"{folder}/repeat.view", "--where", WHERE, "--repeat", REPEAT)
    part("view: where and without 1,000", *create, f"{folder}/without.view", "--where", WHERE, *gone)
    part("view: without alone", *create, f"{folder}/alone.view", *gone)
    part("DuckDB: first of each of 5e7 clusters", *own, "query", firsts)
    part("view: dedup", *create, f"{folder}/dedup.view", "--dedup", "cluster")
    part("read", *own, "read")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    main()
