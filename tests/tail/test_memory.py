"""Memory that llama.cpp does not get: a sentence, and what can be done again gives the same as before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_tiny

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it preloads a library")
LARGE = 32 << 10
"""Allocations of less nearly always come out of memory that the process has already."""
UNCHECKED = 5
"""Large allocations of a context that llama.cpp does not look at before it uses them: the process ends
(`ggml_backend_sched_new`, `ggml_gallocr_reserve_n`)."""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    library = tmp_path_factory.mktemp("shim") / "failing_malloc.so"
    source = Path(__file__).with_name("failing_malloc.cpp")
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


def fail(shim: Path, folder: Path, k: int, every: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What became of whole programs, and of evaluations, with one large allocation failing each."""
    path = write_tiny(folder / "tiny.gguf", n_layers=3)
    environment = {**os.environ, "LD_PRELOAD": str(shim), "GGML_NO_BACKTRACE": "1", "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-m", "tests.tail.failing", str(path), str(k), str(LARGE), str(every)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [line for line in lines if "code" in line], [line for line in lines if "raised" in line]


def check(shim: Path, folder: Path, k: int, every: int) -> None:
    programs, evaluations = fail(shim, folder, k, every)
    assert evaluations
    assert all(line["raised"] in ("HostMemoryError", "") and line["same"] for line in evaluations), evaluations
    assert any(line["raised"] for line in evaluations)
    assert sum(line["code"] < 0 for line in programs) <= UNCHECKED
    sentences = [line["words"] for line in programs if line["code"] >= 0]
    assert all(line["code"] in (0, 2, -11, -6) for line in programs), programs
    assert all("Traceback" not in words and words.count("hybrid: ") <= 1 for words in sentences), sentences
    assert sum("hybrid: " in words for words in sentences) > len(sentences) // 2


def test_llama_cpp_may_run_out_of_memory(shim: Path, tmp_path: Path) -> None:
    check(shim, tmp_path, k=1, every=5)


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1])
def test_llama_cpp_may_run_out_of_memory_anywhere(shim: Path, tmp_path: Path, k: int) -> None:
    check(shim, tmp_path, k, every=1)
