"""Which thread of which process uses a loader: two that took turns would each miss some of the steps."""

from __future__ import annotations

import os
import threading
from typing import NoReturn

from corpus_client import errors


class Owner:
    """The thread that iterates over a loader, in the process that made it.

    Attributes:
        thread: None: nobody has begun, or whoever comes next may go on.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.thread: threading.Thread | None = None
        self._lock = threading.RLock()  # a signal handler may close the loader meanwhile

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the loader, and not one forked from it."""
        return os.getpid() == self.pid

    def check(self) -> None:
        """Make the calling thread the one that iterates; refuse a second one by name.

        Two threads in `__next__` would deliver a step twice. A thread that has ended may be followed.
        """
        self.check_process()
        if not self.takes_over():
            self.refuse_thread()

    def takes_over(self) -> bool:
        """Make the calling thread the one that iterates, unless another one does that runs."""
        if not self.is_here:
            return False
        thread = threading.current_thread()
        with self._lock:
            owner = self.thread
            if owner is None or owner is thread or not owner.is_alive():
                self.thread = owner = thread
        return owner is thread

    def refuse_thread(self) -> NoReturn:
        """Raise `SecondThread`, which names both."""
        owner = getattr(self.thread, "name", "another")
        raise errors.SecondThread(
            f"thread {threading.current_thread().name!r} uses a loader over which thread {owner!r} iterates; "
            f"make a loader for each thread, or hand it over by loader.seek(loader.step) in {owner!r}"
        )

    def check_process(self) -> None:
        """Raise `ForkedLoader` in a process that was forked from the loader's."""
        if not self.is_here:
            raise errors.ForkedLoader(
                "a loader was used in a forked process, where its thread and sockets do not exist; "
                "make it there (it prefetches by itself; if it must be a DataLoader: CorpusIterableDataset)"
            )
