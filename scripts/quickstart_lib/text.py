"""A corpus from text that every Python installation carries: the standard library and its documentation."""

import hashlib
import os
import platform
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 8192
END_OF_TEXT = "<|endoftext|>"
SPLITS = ("train", "validation")
TOKENS_PER_SHARD = 1_000_000

# A shard of llm.c for GPT-2: 256 int32, of which three are used, then uint16.
_LLMC_MAGIC, _LLMC_VERSION, _LLMC_HEADER_WORDS = 20240520, 1, 256
_ENCODE_TOGETHER = 64  # documents per call: enough for every core, little enough memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text and the part of the corpus that it belongs to."""

    name: str
    text: str

    @property
    def split(self) -> str:
        """The name decides, so that a larger corpus never moves a document: one in twenty validates."""
        return "validation" if _digest(self.name)[0] % 20 == 0 else "train"


def documents(max_bytes: int) -> Iterator[Document]:
    """Python's documentation, then its library in a fixed mixed order (its tests last), until max_bytes."""
    taken = 0
    for document in _all_documents():
        taken += len(document.text.encode())
        if taken > max_bytes:
            return
        yield document


def corpus_path(home: Path, *, corpus_mb: int) -> Path:
    """The folder of this text: whoever finds it there finds it complete."""
    return home / f"python-{platform.python_version()}-{corpus_mb}mb"


def build(home: Path, *, corpus_mb: int, report: Callable[[str], None]) -> Path:
    """Write `train/` and `validation/`, each with llm.c shards and a tokenizer.json, unless they are there.

    The folder is written under another name and renamed when whole, so that a crash never leaves half of it.
    Returns the folder that holds the two.
    """
    finished = corpus_path(home, corpus_mb=corpus_mb)
    if finished.is_dir():
        return finished
    home.mkdir(parents=True, exist_ok=True)
    report("reading the standard library's text")
    texts = list(documents(corpus_mb * 1_000_000))
    report(f"training a byte-level BPE with {VOCAB_SIZE:,} tokens on {len(texts):,} documents")
    tokenizer = train_tokenizer(document.text for document in texts)
    with tempfile.TemporaryDirectory(dir=home, prefix=".building-") as building:
        whole = Path(building, finished.name)
        for split in SPLITS:
            chosen = [document.text for document in texts if document.split == split]
            if not chosen:
                raise ValueError(f"{corpus_mb} MB of text leave nothing for {split}; raise --corpus-mb")
            folder = whole / split
            folder.mkdir(parents=True)
            num_tokens = _write_shards(folder, tokenizer, chosen)
            _write(folder / "tokenizer.json", tokenizer.to_str().encode())
            report(f"{split}: {len(chosen):,} documents, {num_tokens:,} tokens")
        _publish(whole, finished)
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


def _all_documents() -> Iterator[Document]:
    for topic in sorted(topics):
        yield Document(name=f"topic {topic}", text=topics[topic])
    library = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(library) for path in library.rglob("*.py")]
    elsewhere = {"site-packages", "dist-packages", "pydoc_data"}
    sources = [name for name in names if not elsewhere & set(name.parts)]
    for name in sorted(sources, key=lambda name: (_is_test(name), _digest(name.as_posix()))):
        try:
            yield Document(name=name.as_posix(), text=(library / name).read_bytes().decode())
        except (UnicodeDecodeError, OSError):
            continue  # some tests are deliberately not UTF-8


def _is_test(name: Path) -> bool:
    return any(part in ("test", "tests", "idle_test") for part in name.parts)


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _write_shards(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> int:
    """Every document, END_OF_TEXT behind it, never cut by a shard's end. Returns the number of tokens."""
    num_tokens, num_shards = 0, 0
    pending: list[int] = []
    [end_of_text] = tokenizer.encode(END_OF_TEXT).ids
    for first in range(0, len(texts), _ENCODE_TOGETHER):
        for encoding in tokenizer.encode_batch_fast(texts[first : first + _ENCODE_TOGETHER]):
            pending += [*encoding.ids, end_of_text]
        is_last = first + _ENCODE_TOGETHER >= len(texts)
        if len(pending) >= TOKENS_PER_SHARD or (is_last and pending):
            num_tokens, num_shards = num_tokens + len(pending), num_shards + 1
            _write(folder / f"{folder.name}_{num_shards:06d}.bin", _llmc_shard(pending))
            pending = []
    return num_tokens


def _llmc_shard(tokens: list[int]) -> bytes:
    header = np.zeros(_LLMC_HEADER_WORDS, "<i4")
    header[:3] = _LLMC_MAGIC, _LLMC_VERSION, len(tokens)
    return header.tobytes() + np.asarray(tokens, "<u2").tobytes()


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # the rename below must not reach the disk before the content


def _publish(whole: Path, finished: Path) -> None:
    try:
        whole.rename(finished)
    except OSError:
        if not finished.is_dir():  # another quick start that ran at the same time may have been first
            raise
