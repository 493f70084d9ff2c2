"""What is remembered of measurements: kept by all, damaged by nobody, in nobody's way."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid.model.file import ModelFile
from hybrid.schedule.identity import Identity, identify, model_key
from hybrid.schedule.placement import Placement
from hybrid.schedule.profile import MOST_ALIKE, Profile, ProfileStore, Record
from hybrid.schedule.rates import Coefficients, HalfRates
from tests.tiny import write_tiny

HERE = Identity("model", "machine", {"hybrid": "1"})
PLACEMENT = Placement(device="cpu", n_gpu_layers=2, n_ctx=256)
HALF = HalfRates(layer_s=1e-5, weight_bytes_per_s=1e9, flop_per_s=1e9, kv_bytes_per_s=1e9, attention_flop_per_s=1e9)
RATES = Coefficients(
    head=HALF,
    tail=replace(HALF, output_bytes_per_s=2e9, threads=2),
    host_kv_bytes_per_s=1e9,
    bus_bytes_per_s=1e9,
    back_bytes_per_s=1e9,
    crossing_s=0.0,
    token_s=1e-4,
    uncertainty=0.1,
    measured=True,
)


def record(i: int = 0, k: int = 2) -> Record:
    placement = replace(PLACEMENT, n_gpu_layers=k)
    return Record(placement=placement, source="run", at=f"2026-01-01T00:00:{i % 60:02d}+00:00", decode_s=(0.1, 0.2 + i))


def test_what_is_added_is_there_again(tmp_path: Path) -> None:
    store = ProfileStore(HERE, tmp_path)
    assert store.load() == Profile()
    store.add(record(1), rates={"cpu": RATES})
    store.add(record(2))
    assert store.load() == Profile(records=(record(1), record(2)), rates={"cpu": RATES})
    assert [p.suffix for p in tmp_path.iterdir() if not p.name.startswith(".")].count(".json") == 1


def test_only_the_youngest_of_one_placement_are_kept(tmp_path: Path) -> None:
    store = ProfileStore(HERE, tmp_path)
    store.add(record(0, k=1), *(record(i) for i in range(MOST_ALIKE + 5)))
    kept = store.load().records
    assert kept[0] == record(0, k=1)
    assert kept[1:] == tuple(record(i) for i in range(5, MOST_ALIKE + 5))


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.schedule.test_profile import HERE, record;"
        "from hybrid.schedule.profile import ProfileStore; n = int(sys.argv[1]);"
        "store = ProfileStore(HERE, Path(sys.argv[2]));"
        "[store.add(record(i, k=n)) for i in range(12)]"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(n), str(tmp_path)]) for n in range(4)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 4
    profile = ProfileStore(HERE, tmp_path).load()
    assert profile.notes == ()
    for n in range(4):
        assert [r for r in profile.records if r.placement.n_gpu_layers == n] == [record(i, k=n) for i in range(12)]


def damaged(text: str) -> dict[str, str]:
    """Texts that are no profile of ours, by what is wrong with them."""
    whole = json.loads(text)
    first = whole["records"][0]
    return {
        "empty": "",
        "garbage": "\x00\x01",
        "half": text[: len(text) // 2],
        "a list": "[]",
        "a number": "7",
        "nested": "[" * 100_000,
        "no records": json.dumps({**whole, "records": None}),
        "a record of nothing": json.dumps({**whole, "records": [{}]}),
        "seconds that cannot be": json.dumps({**whole, "records": [{**first, "decode_s": [-1]}]}),
        "seconds that are text": json.dumps({**whole, "records": [{**first, "decode_s": ["x"]}]}),
        "not a time": json.dumps({**whole, "records": [{**first, "at": "soon"}]}),
        **{
            f"a record with {name} {value!r}": json.dumps({**whole, "records": [{**first, name: value}]})
            for name, value in (
                ("decode_s", [1e-300]),
                ("depth", "many"),
                ("depth", -1),
                ("depth", 1e300),
                ("n_prompt", None),
                ("predicted_s", -1.0),
                ("wall_s", "long"),
                ("vram_budget", "all"),
                ("host_bytes", 0.5),
                ("source", 3),
                ("failure", 7),
                ("message", None),
            )
        },
        "another field": json.dumps({**whole, "records": [{**first, "colour": "blue"}]}),
        **{
            f"a placement with {name} {value!r}": json.dumps(
                {**whole, "records": [{**first, "placement": {**first["placement"], name: value}}]}
            )
            for name, value in (
                ("n_gpu_layers", "2"),
                ("n_ctx", 0),
                ("n_batch", -1),
                ("n_sequences", True),
                ("kv", "cloud"),
                ("kv_dtype", 2),
                ("kv_budget", "all"),
                ("swa_full", 1),
                ("device", None),
                ("n_threads_tail", 1.5),
            )
        },
        "rates of zero": text.replace('"flop_per_s": 1000000000.0', '"flop_per_s": 0'),
        "rates that are no number": text.replace('"flop_per_s": 1000000000.0', '"flop_per_s": NaN'),
        "another version": json.dumps({**whole, "version": 0}),
        "another release": json.dumps({**whole, "versions": {"hybrid": "0"}}),
        "another model": json.dumps({**whole, "model": "other"}),
        "another machine": json.dumps({**whole, "machine": "other"}),
    }


def test_what_is_no_profile_is_ignored_with_one_line_and_replaced(tmp_path: Path) -> None:
    store = ProfileStore(HERE, tmp_path)
    store.add(record(), rates={"cpu": RATES})
    for wrong, text in damaged(store.path.read_text()).items():
        store.path.write_text(text)
        profile = store.load()
        assert (profile.records, profile.rates) == ((), {}), wrong
        assert len(profile.notes) == 1, wrong
        assert str(store.path) in profile.notes[0], wrong
        if "another" in wrong and wrong != "another field":
            assert ("another version" in profile.notes[0]) == (wrong in ("another version", "another release")), wrong
        store.add(record(3))
        assert store.load().records == (record(3),), wrong


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "folder", Path("/proc/nothing")):
        store = ProfileStore(HERE, folder)
        store.add(record())
        assert store.load().records == ()


def test_an_unreadable_profile_is_said(tmp_path: Path) -> None:
    store = ProfileStore(HERE, tmp_path)
    store.path.mkdir(parents=True)
    assert "cannot be read" in store.load().notes[0]


def test_a_model_is_known_by_its_contents_not_its_name(tmp_path: Path) -> None:
    paths = [
        write_tiny(tmp_path / "a.gguf", n_layers=2),
        write_tiny(tmp_path / "b.gguf", n_layers=2),
        write_tiny(tmp_path / "c.gguf", n_layers=3),
        write_tiny(tmp_path / "d.gguf", n_layers=2, metadata={"general.name": "other"}),
    ]
    keys = []
    for path in paths:
        with ModelFile(path) as file:
            keys.append(model_key(file))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_an_identity_names_the_versions_that_matter(tmp_path: Path) -> None:
    import torch

    from hybrid.tail.llama import LLAMA_CPP_PYTHON

    with ModelFile(write_tiny(tmp_path / "a.gguf", n_layers=2)) as file:
        versions = identify(file).versions
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # not every wheel names its build
    assert versions["llama_cpp"] == LLAMA_CPP_PYTHON


def test_identifying_imports_neither_torch_nor_llama_cpp() -> None:
    code = (
        "import sys, hybrid.schedule.identity as i, hybrid.schedule.profile; i._versions();"
        "assert not {'torch', 'llama_cpp', 'numpy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("depth", [0, 3])
def test_records_keep_depth_and_failures(tmp_path: Path, depth: int) -> None:
    store = ProfileStore(HERE, tmp_path)
    failed = Record(placement=PLACEMENT, source="tune", at="2026-01-01T00:00:00+00:00", depth=depth, failure="killed")
    store.add(failed)
    assert store.load().records == (failed,)
