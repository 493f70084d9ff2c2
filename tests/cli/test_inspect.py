"""Claims about `hybrid inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import gguf

from tests.cli.conftest import Run
from tests.tiny import write_tiny


def test_json_says_what_the_file_holds(tiny: Path, run: Run) -> None:
    facts = json.loads(run("inspect", tiny, "--json").stdout)
    tensors = gguf.GGUFReader(tiny).tensors
    assert facts["path"] == str(tiny)
    assert facts["architecture"] == "llama"
    assert facts["n_layers"] == 4
    assert facts["allowed_n_gpu_layers"] == [0, 1, 2, 3, 4]
    assert facts["bytes"] == sum(t.n_bytes for t in tensors)
    for i, layer in enumerate(facts["layers"]):
        mine = [t for t in tensors if t.name.startswith(f"blk.{i}.")]
        assert layer["index"] == i
        assert layer["bytes"] == sum(t.n_bytes for t in mine)
        assert layer["types"] == {"F32": layer["bytes"]}
    assert sum(t["bytes"] for t in facts["outside"]) + sum(x["bytes"] for x in facts["layers"]) == facts["bytes"]


def test_kv_bytes_follow_heads_type_and_window(tiny: Path, tiny_gemma: Path, run: Run) -> None:
    facts = json.loads(run("inspect", tiny, "-c", "1000", "--json").stdout)
    per_token = 2 * 2 * 64 * 2  # K and V, 2 kv heads of 64 values, 2 bytes
    assert [layer["kv_bytes_per_token"] for layer in facts["layers"]] == [per_token] * 4
    assert facts["kv_bytes"] == 4 * per_token * 1000

    facts = json.loads(run("inspect", tiny_gemma, "-c", "4000", "--kv-type", "f32", "--json").stdout)
    assert [layer["window"] for layer in facts["layers"]] == [16, 16, 16, 16, 16, 0, 16]
    for layer in facts["layers"]:
        assert layer["kv_bytes_per_token"] == 2 * per_token
        tokens = layer["kv_bytes"] / layer["kv_bytes_per_token"]
        assert (tokens < 1000) if layer["window"] else (tokens == 4000)


def test_an_architecture_that_cannot_be_split_says_why(run: Run, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "other.gguf", "rwkv7", n_layers=2)
    facts = json.loads(run("inspect", path, "--json").stdout)
    assert facts["allowed_n_gpu_layers"] == [0]
    assert [(r["first"], r["last"]) for r in facts["refused_n_gpu_layers"]] == [(1, 2)]
    assert "rwkv7" in facts["refused_n_gpu_layers"][0]["reason"]
    assert facts["refused_n_gpu_layers"][0]["reason"] in run("inspect", path).stdout


def test_the_table_groups_layers_that_are_alike(tiny_gemma: Path, run: Run) -> None:
    done = run("inspect", tiny_gemma, COLUMNS="100")
    assert done.stderr == ""
    rows = [line.split()[0] for line in done.stdout.splitlines() if " B" in line and line[0].isdigit()]
    assert rows == ["0-4", "5", "6"]
    assert "-ngl may be 0 to 7" in done.stdout
