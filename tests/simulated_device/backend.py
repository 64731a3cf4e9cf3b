"""Build and load the simulated accelerator of device.cpp; `torch.simulated` has the names of `torch.cuda`.

Loading it cannot be undone in a process, so its devices exist only within `present()`: elsewhere torch finds
none. `pytest_runtestloop` in `tests/conftest.py` loads it before any test, because torch's autograd starts a
thread for each device that exists at the first `backward()` of a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "simulated"
SOURCE = Path(__file__).with_name("device.cpp")
COMPILER = os.environ.get("CXX", "g++")


def missing() -> str:
    """Why it cannot be loaded here; "" if it can."""
    if torch.cuda.is_available():
        return "torch knows one accelerator at a time; CUDA_VISIBLE_DEVICES= hides the GPU"
    return "" if shutil.which(COMPILER) else f"no compiler {COMPILER} for the simulated accelerator"


def build() -> Path:
    """Return the library, kept by torch's version and the source; compiling it takes 10 to 60 s."""
    from torch.utils import cpp_extension

    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "corpus-tests")
    library = cache / f"simulated-device-{version}.so"
    cache.mkdir(parents=True, exist_ok=True)
    with Path(cache, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes begin at once
        if not library.exists():
            partial = library.with_suffix(".partial")
            folders = [f"-I{path}" for path in cpp_extension.include_paths()]
            folders += [f"-L{path}" for path in cpp_extension.library_paths()]
            options = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={_abi()}"]
            command: list[Any] = [
                COMPILER,
                *options,
                "-o",
                partial,
                SOURCE,
                *folders,
                "-ltorch",
                "-ltorch_cpu",
                "-lc10",
            ]
            subprocess.run(command, check=True)
            partial.replace(library)
    return library


def _abi() -> int:
    return int(torch.compiled_with_cxx11_abi())


@functools.cache
def load() -> types.ModuleType:
    """Return the module `torch.simulated`, made once, with the threads that torch's autograd has for it."""
    module = _register()
    module.library.set_available(True)
    module.library.take_torchs_threads(True)
    for index in range(module.device_count()):
        torch.ones(1, device=f"{NAME}:{index}", requires_grad=True).backward()
    module.library.take_torchs_threads(False)
    module.library.set_available(False)
    return module


@functools.cache
def _register() -> types.ModuleType:
    torch.utils.rename_privateuse1_backend(NAME)
    library = ctypes.CDLL(str(build()))
    library.register_hooks()
    for bytes_of in (library.allocated_bytes, library.reserved_bytes):
        bytes_of.restype = ctypes.c_int64
    library.refusal_of_caller.restype = ctypes.c_char_p
    module = _runtime(library)
    torch._register_device_module(NAME, module)
    return module


@contextlib.contextmanager
def present(*, seed: int = 0, delay: float = 0.0) -> Iterator[Any]:
    """Let torch find the devices; yield `torch.simulated`. Operations begin up to `delay` seconds late."""
    module = load()
    module.library.set_delay(int(delay * 1e6), ctypes.c_uint64(seed))
    module.library.set_available(True)
    try:
        yield module
    finally:
        module.library.set_delay(0, ctypes.c_uint64(0))
        for index in range(module.device_count()):
            module.synchronize(index)
        module.library.set_available(False)


def refuse_here(_: int = 0) -> None:
    """Load the devices in this process, and refuse every call of them; a `worker_init_fn` of a DataLoader.

    A forked child is refused anyway, as CUDA refuses it. In any other a call would make a context.
    """
    module = _register()
    module.library.set_available(True)
    module.library.refuse_process(True)


def _runtime(library: Any) -> types.ModuleType:
    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if reason := library.refusal_of_caller():
                raise RuntimeError(reason.decode())
            return function(*arguments, **named)

        return call

    def found(device: Any = None) -> torch.device:
        if isinstance(device, int):
            return torch.device(NAME, device)
        device = torch.device(NAME if device is None else device)
        return device if device.index is not None else torch.device(NAME, current_device())

    def current_device() -> int:
        return int(torch.accelerator.current_device_index())

    class Device(contextlib.ContextDecorator):
        def __init__(self, device: Any) -> None:
            self.index = found(device).index

        def __enter__(self) -> None:
            self.before = current_device()
            torch.accelerator.set_device_index(self.index)

        def __exit__(self, *_: object) -> None:
            torch.accelerator.set_device_index(self.before)

    @contextlib.contextmanager
    def stream(entered: torch.Stream) -> Iterator[None]:
        with Device(entered.device):
            before = torch.accelerator.current_stream(entered.device)
            torch.accelerator.set_stream(entered)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    class Stream(torch.Stream):
        """A class of Python's, so that tests may replace its methods, as those of `torch.cuda.Stream`."""

        def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Stream:
            return (
                super().__new__(cls, **known)
                if known
                else super().__new__(cls, found(device), priority=priority)
            )

        def wait_event(self, event: torch.Event) -> None:
            super().wait_event(event)

    def current_stream(device: Any = None) -> Stream:
        now = torch.accelerator.current_stream(found(device))
        return Stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)

    def page_lock(address: int, num_bytes: int, flags: int) -> int:
        return int(library.page_lock(ctypes.c_size_t(address), ctypes.c_size_t(num_bytes)))

    def page_unlock(address: int) -> int:
        return int(library.page_unlock(ctypes.c_size_t(address)))

    module = types.ModuleType(f"torch.{NAME}")
    runtime = types.SimpleNamespace(
        cudaHostRegister=checked(page_lock), cudaHostUnregister=checked(page_unlock)
    )
    calls: dict[str, Callable[..., Any]] = {
        "current_device": current_device,
        "current_stream": current_stream,
        "device_count": lambda: int(library.num_devices()),
        "is_available": lambda: library.num_devices() > 0,
        "set_device": lambda device: torch.accelerator.set_device_index(found(device).index),
        "synchronize": lambda device=None: torch.accelerator.synchronize(found(device)),
        "is_current_stream_capturing": lambda: False,
        "cudart": lambda: runtime,
        "memory_allocated": lambda device=None: library.allocated_bytes(found(device).index),
        "memory_reserved": lambda device=None: library.reserved_bytes(found(device).index),
        "sleep": lambda seconds: library.sleep_on_stream(ctypes.c_int64(int(seconds * 1e6))),
        "call": lambda function, argument: library.call_on_stream(function, argument),
        "get_device_name": lambda device=None: "simulated accelerator",
        "manual_seed_all": lambda seed: None,
    }
    names = {
        **{name: checked(function) for name, function in calls.items()},
        "library": library,
        "device": Device,
        "stream": stream,
        "Stream": Stream,
        "Event": functools.partial(torch.Event, NAME),
        # What torch itself asks of a backend, as in `torch.manual_seed`.
        "_is_in_bad_fork": lambda: library.refusal_of_caller() is not None,
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module
