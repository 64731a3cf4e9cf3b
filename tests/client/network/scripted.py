"""A server that answers what a test tells it to, byte for byte."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from typing import Any


class ScriptedServer:
    """Accepts connections one after another; answers each request with the next script.

    A script is a list of bytes to send, numbers of seconds and events to wait for, "close" and "reset".
    """

    def __init__(self, *scripts: list[Any]) -> None:
        self._scripts = iter(scripts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[bytes] = []
        self._closed = threading.Event()
        self._peer: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._peer = peer
            with peer, contextlib.suppress(OSError):
                if not self._closed.is_set():
                    self._talk(peer)

    def _talk(self, peer: socket.socket) -> None:
        while received := peer.recv(65536):
            length = re.search(rb"\r\nContent-Length: (\d+)(.*\r\n)*?\r\n", received)
            while length is not None and len(received) < length.end() + int(length[1]):
                received += peer.recv(65536)  # httpx sends a body after its head
            self.requests.append(received)
            for part in next(self._scripts, ["close"]):
                if part == "reset":
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if part in ("close", "reset"):
                    return
                if isinstance(part, bytes):
                    peer.sendall(part)
                elif isinstance(part, threading.Event):
                    part.wait(20)
                else:
                    self._closed.wait(float(part))

    def close(self) -> None:
        """End the thread.

        To close a socket wakes nobody who waits in it. If a signal does so later (SIGSTOP and SIGCONT), the
        kernel goes on with the number of the descriptor, which the listener of another test has by then.
        """
        self._closed.set()
        for each in filter(None, (self._listener, self._peer)):
            with contextlib.suppress(OSError):  # it may be over
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
