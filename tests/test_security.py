"""What the source must not contain: ways to run what a file says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "hybrid").rglob("*.py"), *(ROOT / "scripts").glob("*.py")])
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "torch.save", "numpy.load", "np.load"}
METHODS = {"extractall", "getoutput", "getstatusoutput"}


def found(tree: ast.AST) -> Iterator[str]:
    """What of it a module uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name.rpartition(".")[2] in METHODS:
                yield name
            yield from ("a shell" for k in node.keywords if k.arg == "shell" and ast.unparse(k.value) != "False")


def test_no_source_runs_what_a_file_says() -> None:
    assert len(SOURCES) > 100
    assert {path.name: uses for path in SOURCES if (uses := list(found(ast.parse(path.read_text()))))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval(x)",
        "torch.load(f)",
        "subprocess.run(x, shell=True)",
        "zipfile.ZipFile(f).extractall()",
    ],
)
def test_each_of_them_would_be_found(source: str) -> None:
    assert list(found(ast.parse(source)))
