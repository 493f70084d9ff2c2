"""Other distributions that install the same import folder.

`hybrid` and `dwave-hybrid` on PyPI both bring a folder `hybrid/` of their own. Installed beside ours, the files mix
and whichever came last wins; removing one then removes files of the other.
"""

from __future__ import annotations

from pathlib import Path

import hybrid
from hybrid.errors import UnsupportedError

THEIRS = {"hybrid": "wsgi_app", "dwave-hybrid": "decomposers.py"}
"""Distribution -> something it puts into the folder and we do not."""


def find_clash(folder: Path, exports: object) -> str | None:
    """The distribution whose files are in our package's `folder` (or "unknown"), None if all is well. `exports` is
    the package's `__all__`.

    Costs two `stat` calls; asking importlib.metadata would cost more than the rest of the start.
    """
    for name, file in THEIRS.items():
        if (folder / file).exists():
            return name
    ours = isinstance(exports, (list, tuple)) and "Hybrid" in exports
    return None if ours else "unknown"


def check_package() -> None:
    """Raise UnsupportedError, naming the other distribution and the cure, where the folder is not ours alone."""
    name = find_clash(Path(__file__).parents[1], getattr(hybrid, "__all__", None))
    if name is not None:
        raise UnsupportedError(
            f"Another distribution ({name}) has installed files into this program's import folder 'hybrid'; remove "
            f"both with 'pip uninstall {name if name in THEIRS else 'THE-OTHER'} hybrid-gguf' and install hybrid-gguf "
            "again in an environment of its own."
        )
