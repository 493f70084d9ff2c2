"""The cost model: the arithmetic users check us against, what must hold of any rates, and fitting them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.schedule.cost import CostModel, longest_context
from hybrid.schedule.cost_fit import Measurement, fit
from hybrid.schedule.cost_prior import assumed_rates
from hybrid.schedule.kv_size import kv_bytes_per_token, visible_tokens
from hybrid.schedule.placement import KV_STRATEGIES, Placement
from hybrid.schedule.presets import assumed_machine
from hybrid.schedule.rates import Coefficients, HalfRates
from hybrid.schedule.shape import parse_shape, shape_spec
from hybrid.schedule.shares import with_threads

LLAMA_3_8B = shape_spec(parse_shape("layers=32,kv_heads=8,head_dim=128"))
WINDOWED = shape_spec(parse_shape("layers=12,kv_heads=1,heads=4,head_dim=256,window=512,pattern=6"))
STREAM = Placement(device="cuda", n_gpu_layers=32, n_ctx=128_000, kv="stream")


def model_on(machine: str, spec: object = LLAMA_3_8B, device: str = "cuda") -> CostModel:
    """A model with nothing measured."""
    known = assumed_machine(machine)
    return CostModel(spec, known, assumed_rates(known, device))  # type: ignore[arg-type]


@pytest.mark.parametrize(("n_ctx", "ms"), [(8_000, 32.768), (32_000, 131.072), (128_000, 524.288)])
def test_streaming_all_kv_over_pcie_4(n_ctx: int, ms: float) -> None:
    a100, pcie5 = model_on("a100-pcie4"), model_on("pcie5")
    assert a100.kv_transfer_s(STREAM, n_ctx) == pytest.approx(ms / 1e3)
    assert pcie5.kv_transfer_s(STREAM, n_ctx) == pytest.approx(ms / 2e3)
    four = replace(STREAM, n_sequences=4)
    assert a100.kv_transfer_s(four, n_ctx) == pytest.approx(4 * ms / 1e3)
    assert a100.tpot_s(STREAM, n_ctx) >= ms / 1e3  # nothing hides it


def test_one_layers_kv_at_128000_tokens_by_path() -> None:
    paths = model_on("a100-pcie4").layer_transfer_s(STREAM, 128_000)
    assert paths["hbm"] == pytest.approx(0.262e-3, rel=2e-3)
    assert paths["pcie"] == pytest.approx(16.4e-3, rel=2e-3)
    assert paths["nvme"] == pytest.approx(74.9e-3, rel=1e-3)
    assert paths["pcie"] / paths["hbm"] == pytest.approx(62.5)
    assert paths["nvme"] / paths["hbm"] == pytest.approx(286, rel=1e-2)


def test_a_cached_token_and_layer_costs_0_128_microseconds() -> None:
    a100 = model_on("a100-pcie4")
    one = a100.kv_transfer_s(replace(STREAM, n_gpu_layers=1), 1000) / 1000
    assert one == pytest.approx(0.128e-6)
    assert a100.kv_transfer_s(STREAM, 1000) / 1000 == pytest.approx(4.096e-6)


def test_only_what_computing_covers_is_hidden() -> None:
    a100 = model_on("a100-pcie4")
    device = replace(STREAM, kv="device")
    for depth in (100, 2_000, 32_000):
        streamed, beside = a100.tpot_s(STREAM, depth), a100.tpot_s(device, depth)
        assert max(beside, a100.kv_transfer_s(STREAM, depth)) <= streamed
        assert streamed <= beside + a100.kv_transfer_s(STREAM, depth)


def test_times_add_and_speeds_do_not() -> None:
    model = model_on("rtx3070ti")
    ends = [
        model.tpot_s(with_threads(replace(STREAM, kv="device", n_gpu_layers=k), LLAMA_3_8B, 8), 0) for k in (0, 16, 32)
    ]
    assert ends[1] == pytest.approx((ends[0] + ends[2]) / 2, rel=0.1)
    assert 1 / ends[1] < 0.8 * (1 / ends[0] + 1 / ends[2]) / 2


def test_a_window_bounds_what_a_layer_reads_and_moves() -> None:
    model = model_on("rtx3070ti", WINDOWED)
    base = Placement(device="cuda", n_gpu_layers=12, n_ctx=65536, kv="stream", kv_keep_sliding=False)
    deep, deeper = model.kv_transfer_s(base, 10_000), model.kv_transfer_s(base, 20_000)
    per_token = 2 * 256 * 2 * 2 / 32e9  # K and V of 256 values, two global layers
    assert deeper - deep == pytest.approx(10_000 * per_token)
    assert deep == pytest.approx((10 * 511 + 2 * 10_000) * 2 * 256 * 2 / 32e9)
    kept = replace(base, kv_keep_sliding=True)
    assert model.kv_transfer_s(kept, 10_000) == pytest.approx(2 * 10_000 * 2 * 256 * 2 / 32e9)


def test_tiered_lies_between_device_and_attend() -> None:
    model = model_on("rtx3070ti")
    base = replace(STREAM, n_ctx=32_000)
    device, attend = (model.tpot_s(replace(base, kv=kv), 32_000) for kv in ("device", "attend"))  # type: ignore[arg-type]
    budgets = [0, 1 << 29, 1 << 30, 2 << 30, 1 << 40]
    tiered = [model.tpot_s(replace(base, kv="tiered", kv_budget=budget), 32_000) for budget in budgets]
    assert tiered[0] == pytest.approx(attend)
    assert tiered[-1] == pytest.approx(device)
    assert tiered == sorted(tiered, reverse=True)
    assert model.tpot_s(replace(base, kv="tiered", kv_budget=None), 32_000) == pytest.approx(device)


halves = st.builds(
    HalfRates,
    layer_s=st.floats(0, 1e-3),
    weight_bytes_per_s=st.floats(1e9, 4e12),
    flop_per_s=st.floats(1e10, 1e15),
    kv_bytes_per_s=st.floats(1e8, 4e12),
    attention_flop_per_s=st.floats(1e9, 1e15),
    chunk_layer_s=st.floats(0, 1e-3),
    threads=st.sampled_from([0, 4]),
)
rates = st.builds(
    Coefficients,
    head=halves,
    tail=halves,
    host_kv_bytes_per_s=st.floats(1e8, 1e11),
    bus_bytes_per_s=st.floats(1e9, 1e11),
    back_bytes_per_s=st.floats(1e9, 1e11),
    crossing_s=st.floats(0, 1e-3),
    token_s=st.floats(0, 1e-2),
    uncertainty=st.just(0.1),
    measured=st.just(True),
)
placements = st.builds(
    Placement,
    device=st.sampled_from(["cuda", "cpu"]),
    n_gpu_layers=st.integers(0, 12),
    n_ctx=st.just(100_000),
    n_batch=st.sampled_from([64, 512]),
    n_sequences=st.integers(1, 8),
    kv=st.sampled_from(KV_STRATEGIES),
    kv_dtype=st.sampled_from(["f16", "q8_0"]),
    kv_budget=st.sampled_from([None, 0, 1 << 24]),
    kv_keep_sliding=st.booleans(),
    n_threads_head=st.integers(1, 4),
    n_threads_tail=st.integers(1, 4),
    n_threads_tail_batch=st.integers(1, 4),
)


@settings(deadline=None, max_examples=60)
@given(rates, placements, st.integers(0, 90_000), st.integers(1, 9_000))
def test_deeper_longer_and_more_sequences_never_take_less(
    coefficients: Coefficients, p: Placement, depth: int, more: int
) -> None:
    model = CostModel(WINDOWED, assumed_machine("rtx3070ti"), coefficients)
    slack = 1 - 1e-9
    assert model.prefill_s(p, more + p.n_batch) >= model.prefill_s(p, more) * slack
    if p.kv == "tiered":
        return  # rows that spill move from one memory to another, which may be the faster or the idle one
    assert model.tpot_s(p, depth + more) >= model.tpot_s(p, depth) * slack > 0
    assert model.tpot_s(replace(p, n_sequences=p.n_sequences + 1), depth) >= model.tpot_s(p, depth) * slack
    assert model.kv_transfer_s(p, depth + more) >= model.kv_transfer_s(p, depth)


@settings(deadline=None, max_examples=60)
@given(rates, placements, st.integers(0, 90_000))
def test_two_memories_read_at_once_are_no_faster_than_their_sum(
    coefficients: Coefficients, p: Placement, depth: int
) -> None:
    model = CostModel(WINDOWED, assumed_machine("rtx3070ti"), coefficients)
    tiered = replace(p, kv="tiered")
    head = coefficients.head.at(p.n_threads_head) if p.device == "cpu" else coefficients.head
    both = head.kv_bytes_per_s + coefficients.host_kv_bytes_per_s
    read = p.n_sequences * sum(
        (visible_tokens(layer, depth) + 1) * kv_bytes_per_token(layer, p.kv_dtype)
        for layer in WINDOWED.layers[: p.n_gpu_layers]
    )
    assert model.head_s(tiered, depth) >= read / both * (1 - 1e-9)


@settings(deadline=None, max_examples=60)
@given(rates, placements, st.floats(1e-6, 10))
def test_the_longest_context_is_the_last_that_is_quick_enough(
    coefficients: Coefficients, p: Placement, target: float
) -> None:
    model = CostModel(WINDOWED, assumed_machine("rtx3070ti"), coefficients)
    found = longest_context(model, p, target, 50_000)
    assert -1 <= found <= 50_000
    if found >= 0:
        assert model.tpot_s(p, found) <= target
    if found < 50_000:
        assert model.tpot_s(p, found + 1) > target


def test_prefill_overlaps_the_halves() -> None:
    model = model_on("rtx3070ti")
    p = with_threads(Placement(device="cuda", n_gpu_layers=8, n_ctx=8192, n_batch=512), LLAMA_3_8B, 8)
    chunks = [model.chunk_s(p, 512, at) for at in range(0, 8192, 512)]
    head, tail = (sum(part) for part in zip(*chunks, strict=True))
    whole = model.prefill_s(p, 8192)
    assert max(head, tail) < whole < head + tail
    assert whole == pytest.approx(max(head, tail) + min(chunks[0]), rel=0.05)


def test_a_long_prompt_is_estimated_from_some_of_its_chunks() -> None:
    model = model_on("rtx3070ti")
    p = replace(STREAM, kv="device")
    exact = sum(model.chunk_s(p, 512, at)[0] for at in range(0, 102_400, 512))
    assert model.prefill_s(p, 102_400) == pytest.approx(exact, rel=0.01)


def test_more_threads_are_quicker_but_not_by_as_much() -> None:
    half = HalfRates(layer_s=1e-5, weight_bytes_per_s=1e10, flop_per_s=1e11, kv_bytes_per_s=1e10,
                     attention_flop_per_s=1e10, threads=4)  # fmt: skip
    assert half.weight_bytes_per_s < half.at(8).weight_bytes_per_s < 2 * half.weight_bytes_per_s
    assert half.at(8).at(4).flop_per_s == pytest.approx(half.flop_per_s)
    assert half.at(4) is half


@pytest.mark.parametrize("kv", KV_STRATEGIES)
def test_on_a_host_that_is_so_many_times_slower_all_that_it_does_takes_so_many_times_as_long(kv: str) -> None:
    for device, head in (("cpu", True), ("cuda", False)):
        model = model_on("rtx3070ti", WINDOWED, device)
        slow = replace(model, rates=model.rates.slower(3.0, head=head))
        alone = Placement(device=device, n_gpu_layers=0, n_ctx=4096, n_threads_tail=4)
        assert slow.tpot_s(alone, 1000) == pytest.approx(3 * model.tpot_s(alone, 1000))
        assert slow.prefill_s(alone, 1000) == pytest.approx(3 * model.prefill_s(alone, 1000))
        split = replace(alone, n_gpu_layers=12, kv=kv)  # type: ignore[arg-type]
        factor = slow.head_s(split, 1000) / model.head_s(split, 1000)
        assert 1 <= factor <= 3
        if kv == "device":
            assert factor == pytest.approx(3 if head else 1)


# -- fitting -----------------------------------------------------------------------------------------------------------


def measurements(model: CostModel, ks: list[int], depths: list[int]) -> list[Measurement]:
    """What a clock would say if the model were true."""
    found = []
    for k, depth in itertools.product(ks, depths):
        p = with_threads(Placement(device="cpu", n_gpu_layers=k, n_ctx=4096, n_batch=128), model.spec, 2)
        head, tail = model.head_s(p, depth), model.tail_s(p, depth)
        found.append(
            Measurement(
                placement=p, kind="decode", depth=depth, head_s=head or None, tail_s=tail or None,
                total_s=model.tpot_s(p, depth),
            )
        )  # fmt: skip
        head, tail = model.chunk_s(p, 128, depth)
        found.append(Measurement(placement=p, kind="prefill", depth=depth, n_tokens=128, head_s=head, tail_s=tail))
    return found


def true_model() -> CostModel:
    """Rates far from what would be assumed."""
    machine = assumed_machine("cpu")
    prior = assumed_rates(machine, "cpu")
    head = replace(
        prior.head,
        weight_bytes_per_s=3e9,
        kv_bytes_per_s=4e8,
        flop_per_s=2e10,
        attention_flop_per_s=4e9,
        layer_s=2e-4,
        chunk_layer_s=1e-3,
    )
    tail = replace(
        prior.tail,
        weight_bytes_per_s=9e9,
        kv_bytes_per_s=2e9,
        flop_per_s=9e10,
        attention_flop_per_s=8e9,
        output_bytes_per_s=2e10,
    )
    truth = replace(prior, head=replace(head, threads=1), tail=replace(tail, threads=2), token_s=3e-4, crossing_s=1e-4)
    return CostModel(WINDOWED, machine, truth)


def test_fitting_predicts_splits_and_depths_that_were_not_measured() -> None:
    truth = true_model()
    given_ = measurements(truth, [3, 9], [0, 700])
    found = fit(truth.spec, truth.machine, assumed_rates(truth.machine, "cpu"), given_)
    assert found.measured
    assert found.uncertainty < 0.1
    fitted = replace(truth, rates=found)
    for k, depth in itertools.product([1, 5, 11], [200, 3000]):
        p = with_threads(Placement(device="cpu", n_gpu_layers=k, n_ctx=4096, n_batch=128), truth.spec, 2)
        assert fitted.tpot_s(p, depth) == pytest.approx(truth.tpot_s(p, depth), rel=0.05)
        assert fitted.prefill_s(p, 1000, depth) == pytest.approx(truth.prefill_s(p, 1000, depth), rel=0.05)


def test_what_was_not_measured_stays_as_assumed() -> None:
    truth = true_model()
    prior = assumed_rates(truth.machine, "cpu")
    found = fit(truth.spec, truth.machine, prior, [])
    assert (found.head, found.tail, found.uncertainty) == (prior.head, prior.tail, prior.uncertainty)
    only_decode = [m for m in measurements(truth, [3, 9], [0, 700]) if m.kind == "decode"]
    found = fit(truth.spec, truth.machine, prior, only_decode)
    assert found.head.flop_per_s == prior.head.flop_per_s
    assert found.tail.weight_bytes_per_s != prior.tail.weight_bytes_per_s


def test_noise_shows_in_the_stated_uncertainty() -> None:
    truth = true_model()
    clean = measurements(truth, [3, 9], [0, 700])
    noisy = []
    for i, m in enumerate(clean):
        head, tail = (1.3 if i % 2 else 0.8), (1.3 if i % 3 else 0.7)
        noisy.append(replace(m, head_s=m.head_s and m.head_s * head, tail_s=m.tail_s and m.tail_s * tail))
    prior = assumed_rates(truth.machine, "cpu")
    quiet = fit(truth.spec, truth.machine, prior, clean).uncertainty
    loud = fit(truth.spec, truth.machine, prior, noisy).uncertainty
    assert quiet < 0.1 < loud


def test_rates_stay_positive_whatever_was_measured() -> None:
    truth = true_model()
    absurd = [replace(m, head_s=1e-9, tail_s=1e-9, total_s=1e-9) for m in measurements(truth, [3, 9], [0, 700])]
    found = fit(truth.spec, truth.machine, assumed_rates(truth.machine, "cpu"), absurd)
    for half in (found.head, found.tail):
        assert half.weight_bytes_per_s > 0
        assert half.kv_bytes_per_s > 0
        assert half.flop_per_s > 0
        assert half.layer_s >= 0
    assert found.token_s >= 0
