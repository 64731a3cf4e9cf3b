"""Kills this process before a chosen change of a build's files; Python imports it at start, by its name.

FAULT_AT is `parent:17` or `worker:17`: SIGKILL ends such a process before it opens, renames, makes, removes
or flushes a file in the work folder for the 17th time. Each such event adds a line to the file FAULT_LOG.
"""

import os
import signal
import sys

ROLE = "worker" if "--multiprocessing-fork" in sys.argv else "parent"
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "fsync")
ROLE_TO_KILL, _, NUMBER = os.environ.get("FAULT_AT", "none:0").partition(":")
LOG = (
    os.open(os.environ["FAULT_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if "FAULT_LOG" in os.environ
    else -1
)
count = 0
plain_fsync = os.fsync


def note(event: str, arguments: tuple[object, ...]) -> None:
    global count
    if event in EVENTS and (event == "fsync" or any(".building" in str(each) for each in arguments)):
        count += 1
        if LOG >= 0:
            os.write(LOG, f"{ROLE}\n".encode())
        if ROLE_TO_KILL == ROLE and count == int(NUMBER):
            os.kill(os.getpid(), signal.SIGKILL)


def fsync(file: int) -> None:
    note("fsync", ())
    plain_fsync(file)


os.fsync = fsync
sys.addaudithook(note)
