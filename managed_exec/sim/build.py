"""The simulator's C++ backend: compiled on first use, cached by PyTorch, loaded once per process.

The cache's key is the torch version and a hash of the source, so that no process ever loads a backend made for another
torch or from another source. Processes that need it at the same time wait for one of them to build it.

Not covered: what the backend does. See ``backend.cpp``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, cast

import torch

from managed_exec.errors import SimulatorUnavailableError

_SOURCE = Path(__file__).with_name("backend.cpp")
_FLAGS = ("-O1",)  # most of the build time is torch's headers; the kernels are torch's own, compiled as ever
_OLDEST_TORCH = (2, 10)
_TAIL_LINES = 30  # of the compiler's output that an error shows


class Backend(Protocol):
    """The functions of the C++ module. Device -1 stands for the current device, or for any device in a fault."""

    MAX_DEVICES: int

    def register_backend(self) -> None: ...
    def configure(
        self, count: int, capacity: int, host_bandwidth: float, peer_bandwidth: float, kernel_s: float
    ) -> None: ...
    def live_bytes(self) -> list[int]: ...
    def set_capacity(self, device: int, capacity: int) -> None: ...
    def device_count(self) -> int: ...
    def current_device(self) -> int: ...
    def exchange_device(self, device: int) -> int: ...
    def set_device(self, device: int) -> None: ...
    def synchronize(self, device: int) -> None: ...
    def memory_info(self, device: int) -> tuple[int, int]: ...
    def default_generator(self, device: int) -> torch.Generator: ...
    def in_bad_fork(self) -> bool: ...
    def run_kernel(self, seconds: float) -> None: ...
    def exchange_kernel_seconds(self, seconds: float) -> float: ...
    def hold_stream(self, device: int, stream: int) -> None: ...
    def release_stream(self, device: int, stream: int) -> None: ...
    def fail_allocation(self, n: int, device: int) -> None: ...
    def fail_share(self, share: float, seed: int, device: int) -> None: ...
    def fail_first_tries(self, device: int) -> None: ...
    def break_device(self, device: int) -> None: ...
    def clear_faults(self) -> None: ...
    def injected_faults(self) -> int: ...


# The loaded module; written once, under the lock.
_backend: Backend | None = None
_lock = threading.Lock()


def loaded_backend() -> Backend | None:
    """Return the backend if this process has loaded it."""
    return _backend


def enabled_backend() -> Backend:
    """Return the backend for what needs simulated devices.

    Raises:
        RuntimeError: this process has not loaded it.
    """
    if _backend is None:
        raise RuntimeError("the simulated accelerator is not enabled; call managed_exec.sim.enable() first")
    return _backend


def load_backend() -> Backend:
    """Return the backend, building and loading it if need be (about 40 s the first time on a machine).

    Raises:
        SimulatorUnavailableError: torch is too old, there is no compiler or no ninja, or the compilation failed.
    """
    global _backend
    with _lock:
        if _backend is None:
            _check_torch()
            name = _build_name()
            folder = _build_folder(name)
            with _exclusive(folder.with_name(f"{name}.flock")):
                if not _is_complete(folder, name):
                    _build(folder, name)
            _backend = _import(folder, name)
        return _backend


def _check_torch() -> None:
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise SimulatorUnavailableError(
            f"the simulated accelerator needs torch {oldest} or later, got {torch.__version__}; install a newer torch"
        )


def _build_name() -> str:
    digest = hashlib.sha256(_SOURCE.read_bytes() + repr(_FLAGS).encode()).hexdigest()[:16]
    version = re.sub(r"\W", "_", torch.__version__)
    return f"managed_exec_sim_{version}_{sys.implementation.cache_tag.replace('-', '_')}_{digest}"


def _build_folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def _library(folder: Path, name: str) -> Path:
    return folder / f"{name}.so"


def _stamp(folder: Path) -> Path:
    return folder / "complete"


def _is_complete(folder: Path, name: str) -> bool:
    # The stamp is written last: a library without it may be a link that was interrupted.
    return _stamp(folder).exists() and _library(folder, name).exists()


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a file lock that the system releases when the process dies, unlike the one torch uses."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _build(folder: Path, name: str) -> None:
    """Compile the backend into *folder*. The folder's lock is held."""
    from torch.utils import cpp_extension

    with _tools_on_path():
        # torch's own lock file may be left from a process that died; nobody else builds while ours is held.
        (folder / "lock").unlink(missing_ok=True)
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                cpp_extension.load(
                    name,
                    [str(_SOURCE)],
                    extra_cflags=list(_FLAGS),
                    build_directory=str(folder),
                    is_python_module=False,
                    verbose=False,
                )
        except (RuntimeError, OSError) as error:
            tail = "\n".join(f"{output.getvalue()}{error}".splitlines()[-_TAIL_LINES:])
            raise SimulatorUnavailableError(
                f"the simulated accelerator could not be compiled with {_compiler()} against torch "
                f"{torch.__version__}. The end of the compiler's output:\n{tail}"
            ) from error
    _stamp(folder).touch()


@contextlib.contextmanager
def _tools_on_path() -> Iterator[None]:
    """Make sure of a compiler and of ninja, which pip installs where PATH may not lead."""
    compiler = _compiler()
    if shutil.which(compiler) is None:
        raise SimulatorUnavailableError(
            f"the simulated accelerator is compiled on first use and found no C++ compiler ({compiler!r} is not on "
            "PATH); install g++ (Debian: apt-get install g++) or set the environment variable CXX"
        )
    before = os.environ.get("PATH", "")
    if shutil.which("ninja") is None:
        folder = _folder_of_ninja_package()
        if folder is None:
            raise SimulatorUnavailableError(
                "the simulated accelerator is compiled on first use and found no ninja; install it with "
                "pip install 'managed_exec[sim]'"
            )
        os.environ["PATH"] = f"{before}{os.pathsep}{folder}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _compiler() -> str:
    from torch.utils.cpp_extension import get_cxx_compiler

    return str(get_cxx_compiler())  # type: ignore[no-untyped-call]  # torch's is not annotated


def _folder_of_ninja_package() -> str | None:
    for folder in (Path(sys.executable).parent, *_ninja_package_folders()):
        if shutil.which("ninja", path=str(folder)) is not None:
            return str(folder)
    return None


def _ninja_package_folders() -> list[Path]:
    try:
        import ninja
    except ImportError:
        return []
    return [Path(ninja.BIN_DIR)]


def _import(folder: Path, name: str) -> Backend:
    spec = importlib.util.spec_from_file_location(name, _library(folder, name))
    if spec is None or spec.loader is None:
        raise SimulatorUnavailableError(f"{_library(folder, name)} is not a Python extension module")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise SimulatorUnavailableError(
            f"the simulated accelerator's library does not load ({error}); remove {folder} to have it built anew"
        ) from error
    return cast(Backend, module)
