"""Memory that llama.cpp asks for and does not get: a process with `failing_malloc.cpp` preloaded, as a module.

    LD_PRELOAD=failing_malloc.so python -m tests.tail.failing MODEL K LEAST EVERY

prints a JSON line for every EVERY-th kind of allocation (chain of callers) of at least LEAST bytes: of loading and
running the whole program in a fork ({"code", "words"}), and of an evaluation in this process, after which the same one
must succeed ({"raised", "same"}).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import hybrid.cli.app
import hybrid.cli.generate
import hybrid.runtime.api
from hybrid.errors import HybridError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.runtime.engine import Engine
from hybrid.schedule.placement import Placement
from hybrid.tail.llama import lib

TOKENS = list(range(5, 45))
MOST = 100_000
shim = ctypes.CDLL(None)
shim.failing_arm.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
shim.failing_sites.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
shim.failing_sites.restype = ctypes.c_size_t


def sites(every: int) -> list[int]:
    """The first allocation of each kind since `failing_arm(0, …)`; no more are watched."""
    found = (ctypes.c_size_t * MOST)()
    return list(found[: shim.failing_sites(found, MOST)])[::every]


def in_fork(args: list[str], at: int, least: int, every: int, answer: Path) -> dict[str, Any]:
    """Run the whole program with the `at`-th allocation failing; with `at` 0 its allocations are listed instead."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            out = os.open(answer, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.argv = ["hybrid", *args]
            shim.failing_arm(at, least)
            try:
                hybrid.cli.app.main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            if at == 0:
                answer.write_text(json.dumps(sites(every)))
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return {"at": at, "code": os.waitstatus_to_exitcode(status), "words": answer.read_text(errors="replace")[-400:]}


def evaluations(path: str, k: int, least: int, every: int) -> None:
    """Fail in an evaluation, and do it again."""
    placement = Placement(device="cpu", n_gpu_layers=k, n_ctx=64, n_batch=16, n_ubatch=16)
    with ModelFile(path) as file, closing(Engine(file, read_spec(file), placement)) as engine:
        for tokens in (TOKENS, TOKENS[:1]):

            def run(tokens: list[int] = tokens) -> Any:
                engine.trim(0)
                engine.evaluate(tokens)
                return engine.last_logits().copy()

            want = run()
            shim.failing_arm(0, least)
            run()
            for at in sites(every):
                raised = ""
                shim.failing_arm(at, least)
                try:
                    run()
                except HybridError as error:
                    raised = type(error).__name__
                sites(every)
                print(json.dumps({"at": at, "raised": raised, "same": bool(np.array_equal(run(), want))}), flush=True)


def main() -> None:
    """All of it."""
    path, k, least, every = sys.argv[1], *map(int, sys.argv[2:])
    if k:
        import torch  # 1.4 s that forks need not take

        torch.set_num_threads(1)
    lib()
    args = ["generate", path, "-ngl", str(k), "--device", "cpu", "-c", "64", "-n", "3", "-t", "1", "-p", "Hello " * 8]
    answer = Path(path).with_suffix(".answer")
    in_fork(args, 0, least, every, answer)  # the first time, another process tries the file
    in_fork(args, 0, least, every, answer)
    for at in json.loads(answer.read_text()):
        print(json.dumps(in_fork(args, at, least, every, answer)), flush=True)
    evaluations(path, k, least, every)


if __name__ == "__main__":
    main()
