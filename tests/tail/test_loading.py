"""Loading: interruptible, explained when it fails, repeatable afterwards, and as small as promised."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybrid.errors import Cancelled, EngineError, HybridError, UnsupportedError
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.tail import llama
from hybrid.tail.model import open_files, open_virtual
from hybrid.tail.slice import tail_slice
from hybrid.tail.tail import Tail
from tests.oracle.compare import oracle, placement, run_tail, some_tokens
from tests.tail.shards import write_shards
from tests.tiny import write_tiny

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("k", [0, 2])
def test_a_load_can_be_cancelled_and_the_next_one_works(tiny_llama: Path, k: int) -> None:
    with ModelFile(tiny_llama) as file:
        spec = read_spec(file)
        with pytest.raises(Cancelled):
            Tail(file, spec, placement(k), cancelled=lambda: True)
        Tail(file, spec, placement(k), cancelled=lambda: False).close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_in_the_progress_callback_stops_the_load(tiny_llama: Path, error: type[BaseException]) -> None:
    def fail(fraction: float) -> None:
        raise error

    with ModelFile(tiny_llama) as file:
        with pytest.raises(Cancelled if error is KeyboardInterrupt else error):
            Tail(file, read_spec(file), placement(1), progress=fail)
        Tail(file, read_spec(file), placement(1)).close()


def test_progress_ends_at_one(tiny_llama: Path) -> None:
    seen: list[float] = []
    with ModelFile(tiny_llama) as file:
        Tail(file, read_spec(file), placement(1), progress=seen.append).close()
    assert seen[-1] == 1.0
    assert seen == sorted(seen)


@pytest.mark.parametrize("k", [0, 2, 3])
def test_shards_load_like_one_file(k: int, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "gemma3", n_layers=7)
    tokens = some_tokens(30)
    want = oracle(path, tokens, [30])
    with ModelFile(write_shards(path, 4)) as file:
        tail = Tail(file, read_spec(file), placement(k), n_outputs_max=30)
    with tail:
        assert np.array_equal(run_tail(tail, want.hidden[k - 1] if k else tokens, [30]), want.logits)


def test_a_failed_load_says_why_and_the_next_one_works(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model at all")
    with pytest.raises(EngineError, match=r"text\.gguf: .*magic"):
        open_files([tmp_path / "text.gguf"])
    with pytest.raises(EngineError, match=r"missing\.gguf"):
        open_files([tmp_path / "missing.gguf"])
    with ModelFile(tiny_llama) as file:
        virtual = tail_slice(file, read_spec(file), 1)
        broken = [t for t in virtual.tensors if t.name != "blk.2.ffn_up.weight"]
        with pytest.raises(EngineError, match=r"blk\.2\.ffn_up\.weight"):
            open_virtual(type(virtual)(virtual.version, virtual.alignment, virtual.records, broken), "broken")
        open_virtual(virtual, "sound").close()


def test_a_file_that_shrinks_while_it_loads_is_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", n_layers=3)
    with ModelFile(path) as file:
        virtual = tail_slice(file, read_spec(file), 1)
        segments = virtual.segments
        shrunk = SimpleNamespace(segments=lambda: [*segments()[:-2], (file.shards[0].fd, 0, 10)])
        with pytest.raises(HybridError):
            open_virtual(shrunk, "shrunk")  # type: ignore[arg-type]


def test_a_context_that_cannot_be_made_says_why_and_frees_the_model(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", head_dim=48, n_layers=3)
    with ModelFile(path) as file:
        with pytest.raises(EngineError, match="does not divide"):
            Tail(file, read_spec(file), placement(1, kv_dtype="q8_0"))
        Tail(file, read_spec(file), placement(1)).close()


# -- the ABI ---------------------------------------------------------------------------------------------------------


def doctored(**changes: Any) -> SimpleNamespace:
    """The bindings with some attributes replaced."""
    bindings = llama.lib()
    return SimpleNamespace(**{name: getattr(bindings, name) for name in dir(bindings)} | changes)


def test_the_installed_bindings_pass() -> None:
    llama.check_abi(llama.lib(), llama.LLAMA_CPP_PYTHON)


def test_another_release_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"0\.3\.35 is installed"):
        llama.check_abi(llama.lib(), "0.3.35")


def test_a_doctored_struct_is_refused() -> None:
    fields = llama.lib().llama_context_params._fields_

    class Longer(ctypes.Structure):
        _fields_ = [*fields, ("extra", ctypes.c_int64)]

    class Swapped(ctypes.Structure):
        _fields_ = [fields[1], fields[0], *fields[2:7], fields[8], fields[9], fields[7], *fields[10:]]

    for struct, message in ((Longer, "another size"), (Swapped, r"n_threads lies elsewhere")):
        with pytest.raises(UnsupportedError, match=message):
            llama.check_abi(doctored(llama_context_params=struct), llama.LLAMA_CPP_PYTHON)


def test_a_library_with_other_defaults_or_without_a_symbol_is_refused() -> None:
    def defaults() -> Any:
        params = llama.lib().llama_model_default_params()
        params.use_extra_bufts = False
        return params

    with pytest.raises(UnsupportedError, match="use_extra_bufts"):
        llama.check_abi(doctored(llama_model_default_params=defaults), llama.LLAMA_CPP_PYTHON)
    bindings = doctored()
    del bindings.llama_model_load_from_file_ptr
    with pytest.raises(UnsupportedError, match="lacks llama_model_load_from_file_ptr"):
        llama.check_abi(bindings, llama.LLAMA_CPP_PYTHON)


@pytest.mark.parametrize(
    "use", ["from llama_cpp import Llama", "import llama_cpp; llama_cpp.Llama; llama_cpp.llama_cpp._lib"]
)
@pytest.mark.parametrize("ours_first", [True, False])
def test_the_package_still_works_for_others(use: str, ours_first: bool) -> None:
    """We import only its bindings; whoever wants the rest gets it, from the same bindings."""
    ours = "from hybrid.tail.llama import lib; b = lib()"
    first, second = (ours, use) if ours_first else (use, ours)
    check = (
        "import llama_cpp, llama_cpp.llama_cpp as m; assert m is b is llama_cpp.llama_cpp; print(llama_cpp.__version__)"
    )
    code = "; ".join([first, second, check])
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == llama.LLAMA_CPP_PYTHON


def test_our_import_leaves_the_high_level_package_out() -> None:
    code = (
        "import sys; from hybrid.tail.llama import lib; lib(); print(*({'llama_cpp.llama', 'jinja2'} & {*sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


def test_the_project_pins_the_release_that_is_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"llama-cpp-python=={llama.LLAMA_CPP_PYTHON}" in project["dependencies"]


# -- memory ----------------------------------------------------------------------------------------------------------

MEASURE = """
import sys
from hybrid.model.architectures import read_spec
from hybrid.model.file import ModelFile
from hybrid.schedule.placement import Placement
from hybrid.tail.slice import tail_slice
from hybrid.tail.llama import lib
from hybrid.tail.model import open_virtual
from hybrid.tail.tail import Tail
from hybrid.tail.vocab import Vocabulary
import numpy as np

def rss():
    pages = [line for line in open("/proc/self/status") if line.startswith("VmRSS")][0]
    return int(pages.split()[1]) * 1024

path, k = sys.argv[1], int(sys.argv[2])
lib()
Vocabulary.open(path).close()  # the allocator keeps some of it
with ModelFile(path) as file:
    spec = read_spec(file)
    stored = tail_slice(file, spec, k).stored_bytes
    before = rss()
    vocabulary = Vocabulary.open(path)
    vocabulary_bytes = rss() - before
    vocabulary.close()
    before = rss()
    tail = Tail(file, spec, Placement(device="cpu", n_gpu_layers=k, n_ctx=1024, n_batch=256, n_ubatch=256))
tail.decode(np.zeros((256, spec.n_embd), np.float32), np.arange(256), np.zeros(256, int), np.arange(256) == 255)
m = tail.memory
print(rss() - before, stored, m.kv_bytes, m.compute_bytes, m.output_bytes, vocabulary_bytes)
"""


def grown(path: Path, k: int) -> tuple[int, int, int]:
    """RSS that a tail adds in a fresh process, and what it may add: buffers, vocabulary (in bytes)."""
    out = subprocess.run([sys.executable, "-c", MEASURE, str(path), str(k)], capture_output=True, text=True, check=True)
    rss, stored, kv, compute, output, vocabulary = map(int, out.stdout.split())
    return rss, stored + kv + compute + output, max(vocabulary, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_tail_takes_its_tensors_and_buffers_and_hardly_more(tmp_path: Path) -> None:
    """Large matrices, so that the interpreter's own few megabytes do not matter; the embedding is not in the bill."""
    big = {"n_embd": 1024, "n_heads": 16, "n_kv_heads": 8, "n_ff": 8192, "n_layers": 3, "n_ctx": 1024}
    path = write_tiny(tmp_path / "m.gguf", **big)
    rss, buffers, vocabulary = grown(path, 1)
    assert rss <= 1.1 * buffers + vocabulary
    assert rss >= 0.8 * buffers


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.real
def test_a_real_tail_takes_its_tensors_and_buffers_and_hardly_more(real_model: Path) -> None:
    rss, buffers, vocabulary = grown(real_model, 6)
    assert rss <= 1.1 * buffers + vocabulary


def test_a_program_that_imports_llama_cpp_afterwards_does_not_take_our_log(tiny_llama: Path) -> None:
    code = (
        "import sys; from hybrid.tail.reference import Reference\n"
        f"with Reference({str(tiny_llama)!r}, n_ctx=64): pass\n"
        "import llama_cpp\n"
        f"with Reference({str(tiny_llama)!r}, n_ctx=64) as again: sys.exit(not again.kv_bytes)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
