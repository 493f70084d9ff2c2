"""What must hold of every ledger, whatever the model and the placement."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.errors import BadRequestError
from hybrid.model.spec import ModelSpec
from hybrid.schedule.budget import Budget, needed_vram, ram_margin
from hybrid.schedule.kv_size import kv_bytes
from hybrid.schedule.ledger import ledger_of
from hybrid.schedule.placement import KV_DTYPES, KV_STRATEGIES, Placement
from hybrid.schedule.shape import Shape, parse_shape, shape_spec

LLAMA_3_8B = shape_spec(parse_shape("layers=32,kv_heads=8,head_dim=128"))

shapes = st.builds(
    lambda layers, kv_heads, group, head_dim, ff, vocab, window, tied, quant: shape_spec(
        parse_shape(
            f"layers={layers},kv_heads={kv_heads},heads={kv_heads * group},head_dim={head_dim},ff={ff},"
            f"vocab={vocab},window={window},tied={tied},quant={quant}"
        )
    ),
    st.integers(1, 40),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([512, 4096, 14336]),
    st.sampled_from([1000, 128256]),
    st.sampled_from([0, 128, 1024]),
    st.sampled_from([0, 1]),
    st.sampled_from(["F16", "Q8_0", "Q4_K", "IQ2_XS"]),
)


@st.composite
def placements(draw: st.DrawFn, spec: ModelSpec) -> Placement:
    n_batch = draw(st.sampled_from([1, 64, 512, 2048]))
    return Placement(
        device=draw(st.sampled_from(["cuda:0", "mps", "cpu"])),
        n_gpu_layers=draw(st.integers(0, spec.n_layers)),
        n_ctx=draw(st.integers(1, 200_000)),
        n_batch=n_batch,
        n_ubatch=draw(st.sampled_from([1, 64, 512])),
        n_sequences=draw(st.integers(1, 8)),
        kv=draw(st.sampled_from(KV_STRATEGIES)),
        kv_dtype=draw(st.sampled_from(KV_DTYPES)),
        kv_budget=draw(st.sampled_from([None, 0])),
        kv_keep_sliding=draw(st.booleans()),
        swa_full=draw(st.booleans()),
        kv_unified=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_more_context_sequences_or_batch_never_takes_less(data: st.DataObject) -> None:
    spec = data.draw(shapes)
    placement = data.draw(placements(spec))
    before = ledger_of(spec, placement)
    for field in ("n_ctx", "n_sequences", "n_batch", "n_draft"):
        grown = replace(placement, **{field: getattr(placement, field) + data.draw(st.integers(1, 4096))})
        after = ledger_of(spec, grown)
        assert after.ram_bytes >= before.ram_bytes, field
        assert after.vram_bytes >= before.vram_bytes, field
        assert after.kv_bytes >= before.kv_bytes, field


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_more_context_or_sequences_never_yields_more_layers(data: st.DataObject) -> None:
    spec = data.draw(shapes)
    base = replace(data.draw(placements(spec)), device="cuda:0", kv="device")
    budget = Budget(vram_bytes=data.draw(st.integers(0, 80 << 30)), ram_bytes=data.draw(st.integers(0, 128 << 30)))

    def most(placement: Placement) -> int:
        fits = [k for k in range(1, spec.n_layers + 1) if not vram_short(replace(placement, n_gpu_layers=k))]
        return max(fits, default=0)

    def vram_short(placement: Placement) -> bool:
        shortfall = budget.shortfall(ledger_of(spec, placement))
        return shortfall is not None and "VRAM" in shortfall

    longer = replace(base, n_ctx=base.n_ctx + data.draw(st.integers(1, 100_000)))
    wider = replace(base, n_sequences=base.n_sequences + data.draw(st.integers(1, 4)))
    assert most(longer) <= most(base)
    assert most(wider) <= most(base)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_layer_is_in_one_place_and_no_byte_of_kv_is_lost(data: st.DataObject) -> None:
    spec = data.draw(shapes)
    placement = replace(data.draw(placements(spec)), n_ctx=data.draw(st.integers(1, 100)) * 256, kv_unified=False)
    ledger = ledger_of(spec, placement)
    k = placement.n_gpu_layers
    assert len(ledger.device.static.layers) == k
    assert len(ledger.host.static.layers) == (0 if k == spec.n_layers else spec.n_layers - k)
    assert (ledger.device.static.output_head == 0) == (k < spec.n_layers)
    assert sum(ledger.device.dynamic.kv) + sum(ledger.host.dynamic.kv[: -(spec.n_layers - k) or None]) == kv_bytes(
        spec, placement, 0, k
    )
    total = ledger.device.n_bytes + ledger.host.n_bytes
    assert ledger.ram_bytes == (total if ledger.emulated else ledger.host.n_bytes)
    assert 0 <= ledger.mapped_bytes <= ledger.host.static.n_bytes
    assert ledger.mapped_bytes == 0 or k == 0


def test_quantised_weights_stay_as_they_are_on_a_gpu_and_are_expanded_on_the_emulated_one() -> None:
    placement = Placement(device="cuda", n_gpu_layers=1, n_ctx=512)
    layer = LLAMA_3_8B.layers[0]
    assert ledger_of(LLAMA_3_8B, placement).device.static.layers == (layer.weight_bytes,)
    values = sum(t.n_values for t in layer.weights.values())
    assert ledger_of(LLAMA_3_8B, replace(placement, device="cpu")).device.static.layers == (4 * values,)


def test_a_type_the_head_cannot_hold_counts_expanded() -> None:
    spec = shape_spec(parse_shape("layers=2,kv_heads=8,head_dim=128,quant=IQ2_XS"))
    matrices = sum(t.n_values for t in spec.layers[0].weights.values() if len(t.shape) == 2)
    placement = Placement(device="cuda", n_gpu_layers=1, n_ctx=512)
    vectors = 4 * sum(t.n_values for t in spec.layers[0].weights.values() if len(t.shape) == 1)
    assert ledger_of(spec, placement).device.static.layers == (2 * matrices + vectors,)


def test_the_output_head_moves_with_the_last_layer_and_the_embedding_stays() -> None:
    part, whole = (ledger_of(LLAMA_3_8B, Placement(device="cuda", n_gpu_layers=k, n_ctx=512)) for k in (31, 32))
    output = LLAMA_3_8B.weights["output.weight"].n_bytes + LLAMA_3_8B.weights["output_norm.weight"].n_bytes
    assert part.device.static.output_head == 0
    assert part.host.static.output_head == output
    assert whole.device.static.output_head == output
    assert whole.host.static.n_bytes == 0
    # What llama.cpp reads nothing from is a stand-in of 1.125 bits a weight.
    assert part.host.static.embedding == 128256 * 4096 * 18 // 128 // 8 * 8


def test_a_plan_that_only_moves_the_out_of_memory_is_refused() -> None:
    placement = Placement(device="cuda", n_gpu_layers=32, n_ctx=65536, kv="attend")
    ledger = ledger_of(LLAMA_3_8B, placement)
    enough = Budget(vram_bytes=needed_vram(ledger), ram_bytes=ledger.ram_bytes)
    assert enough.shortfall(ledger) is None
    short = replace(enough, ram_bytes=ledger.ram_bytes - 1).shortfall(ledger)
    assert short is not None
    assert "RAM" in short
    short = replace(enough, vram_bytes=needed_vram(ledger) - 1).shortfall(ledger)
    assert short is not None
    assert "VRAM" in short


def test_the_system_keeps_a_margin() -> None:
    assert ram_margin(1 << 30) == 128 << 20
    assert ram_margin(8 << 30) == (8 << 30) // 20
    assert ram_margin(512 << 30) == 1 << 30


def test_a_shape_with_the_defaults_is_a_llama_3_8b() -> None:
    shape = parse_shape("layers=32, kv_heads=8, head_dim=128")
    assert (shape.heads, shape.embd, shape.ff, shape.vocab) == (32, 4096, 14336, 128256)
    n_values = sum(t.n_values for layer in LLAMA_3_8B.layers for t in layer.weights.values())
    n_values += sum(t.n_values for t in LLAMA_3_8B.weights.values())
    assert n_values == 8_030_261_248


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("layers", "'layers'"),
        ("colour=3", "'colour=3'"),
        ("layers=many", "'many'"),
        ("layers=0", "layers"),
        ("heads=10,kv_heads=3", "10 heads"),
        ("quant=Q9_Z", "'Q9_Z'"),
        ("layers=-3", "'-3'"),
        ("head_dim=99999999999", "head_dim"),
    ],
)
def test_a_senseless_shape_is_one_sentence(text: str, named: str) -> None:
    with pytest.raises(BadRequestError) as error:
        parse_shape(text)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_an_empty_shape_is_the_default() -> None:
    assert parse_shape("") == parse_shape("layers=32,kv_heads=8")
    assert Shape().layers == 32
