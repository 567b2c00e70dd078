"""A management library that the tests build: the real ``pynvml`` reads cards that there are not. See nvml_stub.cpp."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = os.environ.get("CXX", "g++")
LIBRARY = "libnvidia-ml.so.1"  # the name that pynvml loads


class NvmlStub:
    """A built library, and the machine that it describes."""

    def __init__(self, folder: Path, *flags: str) -> None:
        if shutil.which(COMPILER) is None:
            pytest.skip(f"no {COMPILER} to build the stub of {LIBRARY} with")
        self.folder = folder
        self.state = folder / "state"
        self.library = folder / LIBRARY
        command = [COMPILER, "-shared", "-fPIC", "-std=c++14", *flags, "-o", str(self.library), str(SOURCE)]
        subprocess.run(command, check=True, timeout=100)

    def describe(self, *lines: str) -> None:
        """Have the library describe another machine from the next call on."""
        next_state = self.folder / "next"
        next_state.write_bytes(b"".join(line.encode("latin-1") + b"\n" for line in lines))
        next_state.replace(self.state)  # at once: the library may be reading

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process load this library."""
        search_path = [str(self.folder), os.environ.get("LD_LIBRARY_PATH", "")]
        return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, search_path)), "NVML_STUB_STATE": str(self.state)}

    def count(self, function: str) -> int:
        """Return how often this process has called ``initialisations`` or ``shutdowns``."""
        return int(getattr(ctypes.CDLL(str(self.library)), f"stub_{function}")())

    def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have this process's ``pynvml`` find this library, as if it had loaded none."""
        import pynvml

        monkeypatch.setenv("NVML_STUB_STATE", str(self.state))
        monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(str(self.folder / name)))
        monkeypatch.setattr(pynvml, "nvmlLib", None)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
