"""How long a conversation takes to its next token when it is opened again: with its saved KV state, and read anew.

    python scripts/bench_session.py [MODEL] [-ngl N|all] [--device cpu] [--tokens 4000] [--kv STRATEGY] [--repeats R]
                                    [--json FILE]

A conversation of so many tokens is evaluated and its state saved. Then, in turns, a fresh context gets the next message
after the whole conversation was read, and after the state was restored from disk (checksum and all); loading the model
is in neither. The bound: restoring is at least 5 times as quick to the first token, and the tokens are the same. Exit
code 1 where either does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hybrid import Completion, Hybrid

BOUND = 5.0
NEXT = "What did we say at the beginning?"
N_ANSWER = 8


def conversation(model: Hybrid, n_tokens: int) -> list[int]:
    """A prompt of that many tokens: Alice, told over and over."""
    text = Path(__file__).with_name("alice.txt").read_text()
    tokens = model.tokenize(text)
    return (tokens * (n_tokens // len(tokens) + 1))[:n_tokens]


def ask(model: Hybrid, prompt: list[int]) -> tuple[float, Completion]:
    """Seconds to the first token of the answer to `prompt`, and the answer."""
    start = time.perf_counter()
    stream = model.generate(prompt, max_tokens=N_ANSWER, temperature=0, ignore_eos=True, stream=True)
    next(stream)
    seconds = time.perf_counter() - start
    for _ in stream:
        pass
    assert stream.completion is not None
    return seconds, stream.completion


def measure(model: Hybrid, n_tokens: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Both ways, in turns."""
    state, said = folder / "bench.state", conversation(model, n_tokens)
    prompt = [*said, *model.tokenize(NEXT, add_special=False)]
    model.generate(said, max_tokens=1, temperature=0)
    start = time.perf_counter()
    n_bytes = model.save_state(state)
    saved_s = time.perf_counter() - start
    read: list[float] = []
    restored: list[float] = []
    restore_alone: list[float] = []
    same = True
    for _ in range(repeats):
        model.engine.trim(0)
        seconds, anew = ask(model, prompt)
        read.append(seconds)
        model.engine.trim(0)
        start = time.perf_counter()
        model.restore_state(state)
        restore_alone.append(time.perf_counter() - start)
        seconds, again = ask(model, prompt)
        restored.append(restore_alone[-1] + seconds)
        same = same and again.tokens == anew.tokens
    return {
        "placement": model.placement.to_dict(),
        "n_tokens": n_tokens,
        "state_bytes": n_bytes,
        "save_s": saved_s,
        "read_s": spread(read),
        "restored_s": spread(restored),
        "restore_alone_s": spread(restore_alone),
        "times": statistics.median(read) / statistics.median(restored),
        "same_tokens": same,
    }


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and ends."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("-ngl", "--n-gpu-layers", default="0")
    parser.add_argument("--device")
    parser.add_argument("--kv", default="device")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    layers = args.n_gpu_layers if args.n_gpu_layers == "all" else int(args.n_gpu_layers)
    options: dict[str, Any] = {"n_gpu_layers": layers, "device": args.device, "kv": args.kv}
    with (
        tempfile.TemporaryDirectory() as folder,
        Hybrid(args.model, n_ctx=args.tokens + 64, **options) as model,
    ):
        found = measure(model, args.tokens, args.repeats, Path(folder))
    print(f"{args.model}, {args.tokens} tokens, -ngl {args.n_gpu_layers}, {os.cpu_count()} logical CPUs")
    print(f"state         {found['state_bytes'] / 2**20:.1f} MiB, saved in {found['save_s']:.2f} s")
    for name, key in (("read anew", "read_s"), ("restored", "restored_s"), ("  of that", "restore_alone_s")):
        s = found[key]
        what = "reading and checking the file" if key == "restore_alone_s" else "to the first token"
        print(f"{name:13} {s['median']:.2f} s ({s['min']:.2f} to {s['max']:.2f}) {what}")
    print(f"{found['times']:.1f} times as quick (bound: {BOUND:g}), same tokens: {found['same_tokens']}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(not (found["times"] >= BOUND and found["same_tokens"]))


if __name__ == "__main__":
    main()
