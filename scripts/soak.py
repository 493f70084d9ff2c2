"""Many short chats with one loaded model: memory must stay what it is, and every answer what it was.

    python -m scripts.soak                                # 10,000 chats with a tiny random model, a third at each -ngl
    python -m scripts.soak smollm2-135m -n 1000 --ngl 0,15,all --kv attend

Chats continue and repeat each other, so that what the caches hold is reused; some are cancelled amid the answer or the
prompt, some are refused, some sequences are rolled back by hand. Greedy answers are compared with the first one to the
same conversation, and where they part two tokens may have been equally likely. Exits with 1 where an answer differs
otherwise, or where memory, threads or open files grow.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import click
import psutil

from hybrid import Completion, Hybrid
from hybrid.errors import BadRequestError
from hybrid.prefix import common_prefix
from tests.tiny import write_tiny

WORDS = ["Hello world", "the ring", "of an", "in her", "a thing", "he", "er in an", "world of the"]
N_CTX, N_TOKENS = 256, 8
WARM_SHARE, LEAST_WARM = 5, 100
"""A fifth of the chats warm up, and so many at least (of few, half): allocators, caches and profiles have then grown to
what they need, and each thread that calls llama.cpp has its helpers, which it gets with its first larger batch."""
GROWTH_BYTES = 5 << 20
TIE = 1e-3
"""Of the largest logit: what 16 bits of K and V make of the last bits in which other batches differ."""
SETTLED = 10
"""Memory is the median of so many readings: one of them may fall in the middle of something."""


@dataclass
class Soak:
    """What became of the chats with one model."""

    chats: Counter[str] = field(default_factory=Counter)
    """How many of each kind."""
    differing: list[str] = field(default_factory=list)
    ties: int = 0
    """Answers that went another way where two tokens were equally likely."""
    rss_bytes: tuple[int, int] = (0, 0)
    """After warming up, and at the end."""
    threads: tuple[int, int] = (0, 0)
    files: tuple[int, int] = (0, 0)

    @property
    def problems(self) -> list[str]:
        """What must not be."""
        found = [f"another answer: {difference}" for difference in self.differing[:3]]
        if self.rss_bytes[1] - self.rss_bytes[0] > GROWTH_BYTES:
            found.append(f"memory grew by {(self.rss_bytes[1] - self.rss_bytes[0]) / 2**20:.1f} MiB")
        for what, (before, after) in (("threads", self.threads), ("open files", self.files)):
            if after > before:
                found.append(f"{what} grew from {before} to {after}")
        return found


def soak(model: Hybrid, n_chats: int, seed: int = 0) -> Soak:
    """Chat that often, and watch."""
    random, result, process = Random(seed), Soak(), psutil.Process()
    answers: dict[str, Completion] = {}
    warm = max(1, n_chats // WARM_SHARE, min(LEAST_WARM, n_chats // 2))
    readings: list[int] = []
    for i in range(n_chats):
        if i == warm:
            gc.collect()
            result.threads, result.files = (process.num_threads(),) * 2, (process.num_fds(),) * 2
        _chat(model, random, result, answers)
        if warm <= i < warm + SETTLED or i >= n_chats - SETTLED:
            readings.append(process.memory_info().rss)
    gc.collect()
    half = len(readings) // 2
    result.rss_bytes = _median(readings[:half]), _median(readings[half:])
    result.threads = result.threads[0], process.num_threads()
    result.files = result.files[0], process.num_fds()
    return result


def _median(values: list[int]) -> int:
    return sorted(values)[len(values) // 2] if values else 0


def _chat(model: Hybrid, random: Random, result: Soak, answers: dict[str, Completion]) -> None:
    """One chat of a random kind."""
    kind = random.choices(["whole", "cancelled", "dropped", "rolled back", "refused"], [12, 3, 2, 2, 1])[0]
    result.chats[kind] += 1
    talk = [{"role": "user", "content": random.choice(WORDS)}]
    for _ in range(random.choice([0, 0, 1, 2])):
        talk += [{"role": "assistant", "content": random.choice(WORDS)}]
        talk += [{"role": "user", "content": random.choice(WORDS)}]
    if kind == "refused":
        try:
            model.chat([{"role": "user", "content": "a " * N_CTX}], max_tokens=1)
        except BadRequestError:
            return
        raise AssertionError("a prompt that does not fit was taken")
    if kind == "rolled back":
        model.engine.trim(random.randrange(model.n_used + 1))
    if kind in ("whole", "rolled back"):
        answer = model.chat(talk, max_tokens=N_TOKENS, temperature=0, ignore_eos=True)
        expected = answers.setdefault(str(talk), answer)
        if answer.tokens != expected.tokens and _is_tie(model, talk, answer.tokens, expected.tokens):
            result.ties += 1
        elif answer != expected:
            result.differing.append(f"{answer!r} instead of {expected!r} to {talk}")
        return
    stream = model.chat(talk, max_tokens=N_TOKENS, temperature=0, ignore_eos=True, stream=True)
    for _, _ in zip(range(random.randrange(N_TOKENS)), stream, strict=False):
        pass
    if kind == "cancelled":
        stream.cancel()
        for _ in stream:
            pass


def _is_tie(model: Hybrid, talk: list[dict[str, str]], ours: list[int], theirs: list[int]) -> bool:
    """Whether the first tokens that differ are equally likely, by logits computed afresh."""
    n = common_prefix(ours, theirs)
    if n == min(len(ours), len(theirs)):
        return False
    model.engine.trim(0)
    model.engine.evaluate([*model.chat_tokens(talk), *ours[:n]])  # type: ignore[arg-type]
    row = model.engine.last_logits()
    return bool(abs(row[ours[n]] - row[theirs[n]]) <= TIE * abs(row).max())


@click.command()
@click.argument("model", required=False)
@click.option("-n", "n_chats", default=10_000, show_default=True, help="Chats in all.")
@click.option("--ngl", default="0,2,all", show_default=True, help="Values of -ngl, which share the chats.")
@click.option("--kv", default="device", show_default=True, help="KV cache of the first layers.")
@click.option("--seed", default=0, show_default=True)
def main(model: str | None, n_chats: int, ngl: str, kv: str, seed: int) -> None:
    """Run it and print what became of memory and answers."""
    bad = False
    with tempfile.TemporaryDirectory(prefix="hybrid-soak-") as folder:
        path = model or write_tiny(Path(folder) / "tiny.gguf", n_layers=4)
        for layers in ngl.split(","):
            options = {"n_gpu_layers": layers, "device": "cpu", "n_ctx": N_CTX, "n_batch": 64, "kv": kv}
            with Hybrid(path, **options) as loaded:  # type: ignore[arg-type]
                result = soak(loaded, n_chats // len(ngl.split(",")), seed)
            grown = (result.rss_bytes[1] - result.rss_bytes[0]) / 2**20
            kinds = ", ".join(f"{n} {kind}" for kind, n in result.chats.items())
            said = f"{result.chats.total()} chats ({kinds}), {result.ties} ties, memory {grown:+.1f} MiB"
            click.echo(f"-ngl {layers}: {said}")
            for problem in result.problems:
                bad = True
                click.echo(f"  {problem}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
