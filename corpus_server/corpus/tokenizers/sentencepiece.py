"""Models of SentencePiece, by the package `sentencepiece`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corpus_server.corpus.tokenizers.tokenizer import TokenArray, Tokenizer, package, piece_bytes, reading


class SentencePiece(Tokenizer):
    """A model of SentencePiece."""

    def __init__(self, path: Path, content: bytes) -> None:
        sentencepiece = package("sentencepiece", path)
        with reading(path, "SentencePiece model"):
            self._inner: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        self.vocab_size = self._inner.vocab_size()
        eot = self._inner.eos_id()
        self.eot_id = eot if eot >= 0 else None

    def knows(self, token: int) -> bool:
        """See `Tokenizer.knows`."""
        return 0 <= token < self.vocab_size

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        # The package leaves control tokens out; here they separate runs, and their names are shown.
        text, run = "", list[int]()
        for token in tokens:
            if self._inner.is_control(token):
                text += self._inner.decode(run) + self._inner.id_to_piece(token)
                run = []
            else:
                run.append(token)
        return text + str(self._inner.decode(run))

    def bytes_of(self, token: int) -> bytes:
        """See `Tokenizer.bytes_of`."""
        piece: str = self._inner.id_to_piece(token)
        if self._inner.is_control(token):
            return piece.encode()
        return piece_bytes(piece)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """See `Tokenizer.encode_batch`."""
        encoded = self._inner.encode(list(texts), out_type=int, num_threads=1)
        return [np.array(each, np.uint32) for each in encoded]
