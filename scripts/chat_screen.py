"""A real chat on an emulated terminal, drawn as SVG: the picture in the README.

    python scripts/chat_screen.py [-o docs/chat.svg] [--columns 100] [--rows 34]

Needs what the tests need (`make test`), and smollm2-135m. What it says is what the model said.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import sys
import tempfile
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.cli.window import Window  # noqa: E402

LINES = [
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "/split",
    "/save paris",
]
OPTIONS = ["smollm2-135m", "-ngl", "15", "--device", "cpu", "--temp", "0", "-n", "160", "-c", "2048",
           "--system", "You are a helpful assistant."]  # fmt: skip


def drawn(window: Window) -> Text:
    """The screen with its colours."""
    text = Text()
    screen = window.screen
    last = max(i for i, line in enumerate(screen.display) if line.strip())
    for y in range(last + 1):
        cells = [screen.buffer[y][x] for x in range(len(screen.display[y].rstrip()))]
        for style, run in itertools.groupby(cells, key=_style):
            text.append("".join(cell.data for cell in run), style)
        text.append("\n" if y < last else "")
    return text


def _style(cell: pyte.screens.Char) -> Style:
    colour = None if cell.fg == "default" else _colour(cell.fg)
    return Style(color=colour, bold=cell.bold, italic=cell.italics, underline=cell.underscore)


def _colour(name: str) -> str:
    """pyte's name of a colour as rich's."""
    if len(name) == 6 and all(c in "0123456789abcdef" for c in name):
        return f"#{name}"
    return {"brown": "yellow"}.get(name, name.replace("bright", "bright_"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "chat.svg")
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--rows", type=int, default=34)
    args = parser.parse_args()
    from hybrid.model.catalog import models_dir

    with tempfile.TemporaryDirectory() as home:
        own = {k: v for k, v in os.environ.items() if not k.startswith(("HYBRID_", "XDG_", "NO_COLOR"))}
        env = {**own, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "HOME": home}
        env["HYBRID_MODELS"] = str(models_dir())
        with Window(*OPTIONS, env=env, columns=args.columns, rows=args.rows) as window:
            for line in LINES:
                window.say(line)
            console = Console(width=args.columns, record=True, file=io.StringIO(), force_terminal=True)
            console.print(drawn(window), soft_wrap=True, end="")
            window.leave()
    args.output.write_text(console.export_svg(title="hybrid chat"))
    print(args.output)


if __name__ == "__main__":
    main()
