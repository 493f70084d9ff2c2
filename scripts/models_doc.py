"""docs/models.md from the table the program itself reads (`hybrid/model/known.py`) and the types its tests run over.

python -m scripts.models_doc     writes docs/models.md
"""

from __future__ import annotations

from pathlib import Path

from hybrid.model.known import KNOWN
from hybrid.model.refused import REFUSED, REFUSED_KEYS
from hybrid.model.splits import rule
from tests.architectures.models import MODELS, TESTED

PATH = Path(__file__).parent.parent / "docs" / "models.md"
TOP = """\
# Models that can be split

Written by `python -m scripts.models_doc`; a test checks that it is current.

k is the number of layers on the GPU (`-ngl`), from 0 (llama.cpp alone) to all of them. Whatever is not in this table
runs with k = 0. `hybrid inspect MODEL` says what holds for your file, and `hybrid inspect --verify MODEL` runs
llama.cpp alone and the split on it and compares them.

At the k named here the CPU half gives llama.cpp's logits bit for bit when it is given llama.cpp's hidden state, and the
GPU half gives llama.cpp's hidden state within 1e-4 (F32 weights, on the CPU; 3e-4 with GELU, which llama.cpp reads from
a table by 11 bits); both are tested with tiny random models of every architecture. "Tested types" are those of the
matrices in the first of these tests. The GPU half expands a type that it cannot keep quantised once, at load, and says
so.

`python -m scripts.eval_split --architectures [NAME ...]` prints a table of architecture, k, difference at the boundary,
exactness of the CPU half and distance of the next-token distribution from llama.cpp's, on the same tiny models.
"""


def text() -> str:
    """The whole page."""
    lines = [TOP, "| architecture | models | allowed k | tested types |", "|---|---|---|---|"]
    for name, architecture in sorted(KNOWN.items()):
        lines.append(f"| `{name}` | {architecture.models} | {rule(architecture)} | {_types(name)} |")
    lines += ["", "## Refused, with k = 0", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in sorted(REFUSED.items())]
    for name, architecture in sorted(KNOWN.items()):
        lines += [f"- `{name}` with `{name}.{key}`: {reason}" for key, reason in architecture.refused.items()]
    lines += [f"- any architecture with `{key}`: {reason}" for key, reason in REFUSED_KEYS.items()]
    lines += ["- any other architecture: not proven", ""]
    return "\n".join(lines)


def _types(architecture: str) -> str:
    models = [tiny for tiny in MODELS.values() if tiny.architecture == architecture]
    names = ["F32"]
    if KNOWN[architecture].no_slice is not None:
        return "F32"
    for types in TESTED.values():
        names += [kind.name for kind in types.kinds]
        if types.expert_kind is not None and any("expert_count" in tiny.keys for tiny in models):
            names.append(f"{types.expert_kind.name} (experts)")
    return ", ".join(dict.fromkeys(names))


if __name__ == "__main__":
    PATH.write_text(text())
