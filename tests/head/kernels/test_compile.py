"""Kernels compile for GPUs that are not here, without spilling; whether they are fast only a GPU can say."""

from __future__ import annotations

import pytest

from scripts.kernel_report import SHARED_BYTES, SPREAD, as_json


def test_a_kernel_of_each_family_compiles_for_old_and_new_gpus() -> None:
    found = as_json(["--spread", "--targets", "75,86,120", "--workers", "2"])
    assert {report["kernel"] for report in found} == set(SPREAD)
    assert len(found) == 3 * len(SPREAD)
    assert [report for report in found if not report["ok"]] == []
    assert all(16 <= report["registers"] <= 255 for report in found)
    reading = [report for report in found if report["kernel"].startswith(("matvec", "tile", "attend"))]
    assert all(report["wide_loads"] for report in reading)


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_BYTES)
def test_every_kernel_compiles_for_every_gpu(target: str) -> None:
    assert [report for report in as_json(["--targets", target, "--workers", "2"]) if not report["ok"]] == []
