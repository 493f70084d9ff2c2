"""`make sanitize`, the quick part of it: the native slice reader under the address sanitizer and its like."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[1] / "native"
SOURCES = ["virtual_file_check.cpp", "virtual_file.cpp", "callbacks.cpp"]
FLAGS = ["-std=c++17", "-O0", "-D_GNU_SOURCE", "-D_FILE_OFFSET_BITS=64", "-fsanitize=address,undefined"]
FLAGS += ["-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-pthread"]
N_FILES = 300


def test_the_slice_reader_touches_nothing_it_should_not(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "check"
    command = [compiler, *FLAGS, *(str(NATIVE / source) for source in SOURCES), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "asan" in built.stderr or "ubsan" in built.stderr:
        pytest.skip("the sanitizers' libraries are not installed")
    assert built.returncode == 0, built.stderr
    run = subprocess.run([program, str(N_FILES)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, f"{N_FILES} virtual files agree\n"), run.stderr[-2000:]
