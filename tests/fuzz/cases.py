"""What is run: a spoilt tiny model of some architecture, and a command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.architectures.models import MODELS, PLAIN
from tests.fuzz.layout import Layout, take_apart
from tests.fuzz.mutations import Mutation, apply, draw
from tests.fuzz.runner import Run, Runner
from tests.tiny_arch import write_arch

FAILED = Path(__file__).with_name("failed.jsonl")
"""Cases that ever did harm, one a line; none of them does any more."""
TALK = "hi\n"


@dataclass(frozen=True)
class Case:
    """Mutations of a base, and the arguments of the program beside the file."""

    base: str
    mutations: list[Mutation]
    args: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, line: str) -> Case:
        """What `to_json` gave."""
        return cls(**json.loads(line))

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    def run(self, runner: Runner, layout: Layout) -> Run:
        """Write the file, run the program on it, and judge."""
        path = runner.folder / "m.gguf"
        path.write_bytes(apply(layout, self.mutations).build())
        command, *options = self.args
        return runner.run([command, str(path), *options], TALK if command == "chat" else "")


def bases(folder: Path, names: list[str] = PLAIN) -> dict[str, Layout]:
    """The layouts of tiny models by name."""
    return {name: take_apart(write_arch(folder / f"{name}.gguf", MODELS[name])) for name in names}


def drawn(layouts: dict[str, Layout], seed: int) -> Iterator[Case]:
    """Cases without end; the bases take turns."""
    random = Random(seed)
    while True:
        for name, layout in layouts.items():
            yield Case(name, draw(layout, random), _arguments(MODELS[name].n_layers, random))


def _arguments(n_layers: int, random: Random) -> list[str]:
    if random.random() < 0.1:
        return ["inspect"]
    layers = ["-ngl", str(random.choice([0, 0, 1, n_layers - 1, n_layers])), "--device", "cpu"]
    context = random.choice([["-c", "64"], ["-c", "64"], ["-c", "64"], [], ["-c", "0"]])
    shared = [*layers, *context, "-n", "2", "-t", "1", "--temp", "0"]
    return ["chat", *shared] if random.random() < 0.3 else ["generate", *shared, "-p", "Hello world"]


def summary(runs: list[tuple[Case, Run]]) -> dict[str, Any]:
    """Figures of a campaign."""
    return {
        "mutations": len(runs),
        "exit 0": sum(run.code == 0 for _, run in runs),
        "exit 2": sum(run.code == 2 for _, run in runs),
        "problems": sum(bool(run.problem) for _, run in runs),
        "longest s": round(max((run.seconds for _, run in runs), default=0.0), 2),
        "most MiB": max((run.rss_bytes for _, run in runs), default=0) >> 20,
    }
