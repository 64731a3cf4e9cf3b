"""A corpus from text that every Python installation carries: the standard library and its documentation."""

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus_server.corpus.publish import publishing

VOCAB_SIZE = 8192
END_OF_TEXT = "<|endoftext|>"
SPLITS = ("train", "val")
TOKENS_PER_SHARD = 1_000_000


def documents(max_bytes: int) -> Iterator[str]:
    """Python's documentation, then its library in a fixed mixed order (its tests last), until max_bytes."""
    taken = 0
    for document in _all_documents():
        taken += len(document.encode())
        if taken > max_bytes:
            return
        yield document


def corpus_path(home: Path, *, corpus_mb: int) -> Path:
    """The folder of this text: whoever finds it there finds it complete."""
    return home / f"python-{platform.python_version()}-{corpus_mb}mb"


def program() -> str:
    """`corpus-server` as a person in the current folder would type it."""
    return os.path.relpath(Path(sys.executable).with_name("corpus-server"))


def build(home: Path, *, corpus_mb: int, report: Callable[[str], None]) -> Path:
    """Build the corpora `train` and `val` with `corpus-server build`, unless they are there.

    Returns the folder that holds the two. An interrupted build continues.
    """
    finished = corpus_path(home, corpus_mb=corpus_mb)
    if finished.is_dir():
        return finished
    home.mkdir(parents=True, exist_ok=True)
    source, tokenizer = (finished.with_name(finished.name + end) for end in (".jsonl", ".tokenizer.json"))
    if not tokenizer.exists():  # it is made last
        report("reading the standard library's text")
        texts = list(documents(corpus_mb * 1_000_000))
        with publishing(source) as file:
            file.writelines(json.dumps({"text": text}).encode() + b"\n" for text in texts)
        report(f"training a byte-level BPE with {VOCAB_SIZE:,} tokens on {len(texts):,} documents")
        with publishing(tokenizer) as file:
            file.write(train_tokenizer(texts).to_str().encode())
    command = [program(), "build", os.path.relpath(source), "--tokenizer", os.path.relpath(tokenizer)]
    command += ["--split", "val=0.05", "--shard-tokens", str(TOKENS_PER_SHARD)]
    command += ["--out", os.path.relpath(finished)]
    report(shlex.join(command))
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode:
        raise ValueError("corpus-server build says why above")
    report(built.stdout.rstrip())
    return finished


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE: every text survives encoding and decoding unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def _all_documents() -> Iterator[str]:
    for topic in sorted(topics):
        yield topics[topic]
    library = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(library) for path in library.rglob("*.py")]
    elsewhere = {"site-packages", "dist-packages", "pydoc_data"}
    sources = [name for name in names if not elsewhere & set(name.parts)]
    for name in sorted(sources, key=lambda name: (_is_test(name), _digest(name.as_posix()))):
        try:
            yield (library / name).read_bytes().decode()
        except (UnicodeDecodeError, OSError):
            continue  # some tests are deliberately not UTF-8


def _is_test(name: Path) -> bool:
    return any(part in ("test", "tests", "idle_test") for part in name.parts)


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
