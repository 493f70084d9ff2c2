"""Compile every kernel for GPUs that need not be here, and tell what compilers say: registers, spills, shared memory.

    python -m scripts.kernel_report --spread            # a few, in a minute
    python -m scripts.kernel_report --write             # all of them, into docs/kernels.md

Exit code 1 if a kernel does not compile, spills registers, keeps an array in local memory, or wants more shared memory
than the GPU has. Nothing here says how fast a kernel is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid.head.kernels import attention, matvec, norm, rope, tiles
from hybrid.head.kernels.attention import Heads
from hybrid.head.kernels.formats import FORMATS
from hybrid.head.kernels.variant import Variant

SHARED_BYTES = {"75": 65536, "80": 166912, "86": 101376, "89": 101376, "90": 232448, "120": 101376, "gfx1100": 65536}
"""Shared memory that one block may have (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability";
of RDNA 3 the workgroup's LDS), by compute capability or AMD's name."""
SMALL = {"75", "gfx1100"}
"""GPUs that get small products of tiles (`hybrid.head.kernels.choice.Kernels`)."""
DOC = Path(__file__).parent.parent / "docs" / "kernels.md"


@dataclass(frozen=True)
class Report:
    """What came of compiling one kernel for one GPU."""

    kernel: str
    target: str
    registers: int = 0
    """Of a thread."""
    spilled_bytes: int = 0
    """Stack, spills and local arrays of a thread."""
    shared_bytes: int = 0
    wide_loads: int = 0
    """Instructions that read 16 bytes of the GPU's memory (NVIDIA)."""
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether it compiled as a kernel should."""
        return not self.error and not self.spilled_bytes and self.shared_bytes <= SHARED_BYTES[self.target]


def variants(small: bool) -> list[Variant]:
    """Every kernel: products and tiles of every format, attention and RoPE for heads of many sizes. `small`: as they
    are on GPUs without tensor cores that Triton knows."""
    found = [
        matvec.variant(form, tokens, bias=True)
        for form in FORMATS.values()
        for tokens in (1, 2, 4, 8)
        if matvec.tokens_of(form, tokens) == tokens
    ]
    found += [
        matvec.variant(form, matvec.tokens_of(form, tokens), bias=True, act="silu", gated=True)
        for form in FORMATS.values()
        for tokens in (1, 8)
    ]
    found += [matvec.variant(form, 1, bias=True, experts=True) for form in FORMATS.values()]
    for act in ("silu", "gelu", "swiglu_oai"):  # what follows the product does not depend on the format
        found += [
            matvec.variant(FORMATS[12], 1, bias=True, act=act, gated=True),
            matvec.variant(FORMATS[12], 8, bias=True, act=act),
            matvec.variant(FORMATS[12], 1, bias=True, experts=True, act=act, gated=True),
            matvec.variant(FORMATS[39], 1, bias=True, experts=True, act=act, gated=True),
        ]
    for dim in (64, 96, 2048, 4096, 16384):
        found += [norm.variant(dim, *does) for does in ((False, False, True), (True, False, True), (True, True, True))]
    found += [tiles.variant(form, dtype) for form in FORMATS.values() for dtype in (torch.bfloat16, torch.float16)]
    for heads, n_tokens in shapes():
        few = small or attention.is_small(heads)
        if attention.takes(heads, n_tokens, few) and not (small and attention.is_small(heads)):
            found.append(attention.attend_variant(heads, n_tokens, heads.sinks, few))
        found.append(attention.merge_variant(heads))
        found.append(rope.variant(heads, heads.dim_k, neox=True, scaled=False))
        found.append(rope.variant(heads, heads.dim_k, neox=False, scaled=True))
    unique = {(v.name, str(sorted(v.constants.items(), key=lambda item: item[0]))): v for v in found}
    return list(unique.values())


def shapes() -> list[tuple[Heads, int]]:
    """Heads as models have them, each with a number of tokens: Llama 8B, Qwen 0.5B, Phi 3, Gemma 2 and 3, gpt-oss."""
    held = (torch.float16, torch.bfloat16, torch.uint8, torch.float32)
    found = [(Heads(32, 8, 128, 128, dtype, False, False), n) for dtype in held for n in (1, 8)]
    found += [(Heads(14, 2, 64, 64, dtype, False, False), 1) for dtype in held]
    found += [(Heads(8, 4, 256, 256, dtype, True, False), n) for dtype in held for n in (1, 8)]
    found += [(Heads(64, 8, 64, 64, dtype, False, True), n) for dtype in held for n in (1, 8)]
    found += [(Heads(32, 32, 96, 96, dtype, False, False), 1) for dtype in held]
    return found


SPREAD = (
    "matvec q4_k x1", "matvec q4_k x1 gated silu", "matvec q6_k x8", "tile q4_k bf16", "attend 128 fp16 x16",
    "norm, add, norm 4096", "rope neox 128 u8",
)  # fmt: skip
"""A kernel of each family."""


def compile_for(variant: Variant, target: str) -> Report:
    """Compile one kernel; `target` is a compute capability, 75 … 120, or AMD's name of a GPU."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    source = ASTSource(
        variant.kernel,
        {name: variant.types.get(name, "constexpr") for name in names},
        dict(variant.constants),
        {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned},
    )
    cuda = target.isdigit()
    gpu = GPUTarget("cuda", int(target), 32) if cuda else GPUTarget("hip", target, 32)
    log = io.StringIO()
    knobs.compilation.always_compile = True  # a cached kernel would come without the compiler's words
    knobs.nvidia.dump_ptxas_log = True
    try:
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, target=gpu, options=variant.options_for(cuda))
    except Exception as error:
        return Report(variant.name, target, error=f"{type(error).__name__}: {str(error).strip()[-500:]}")
    read = _read_ptxas if cuda else _read_amdgcn
    registers, spilled = read(log.getvalue() if cuda else compiled.asm["amdgcn"])
    assert len(compiled.asm["cubin" if cuda else "hsaco"]) > 1000
    wide = (
        len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\S* \[[^]]*\], \[[^]]*\], 0x10", compiled.asm["ptx"]))
        if cuda
        else 0
    )
    return Report(variant.name, target, registers, spilled, int(compiled.metadata.shared), wide)


def _read_ptxas(log: str) -> tuple[int, int]:
    """Registers, and bytes of stack and spills, out of `ptxas -v`. Raises ValueError where it does not say."""
    used = re.search(r"Used (\d+) registers", log)
    sizes = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if used is None or sizes is None:
        raise ValueError(f"ptxas said nothing of registers: {log!r}")
    local = re.search(r"(\d+) bytes lmem", log)
    return int(used[1]), sum(map(int, sizes.groups())) + (int(local[1]) if local else 0)


def _read_amdgcn(assembly: str) -> tuple[int, int]:
    """The same out of AMD's metadata."""

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        if found is None:
            raise ValueError(f"The assembly does not say {key}.")
        return int(found[1])

    spilled = number("vgpr_spill_count") + number("sgpr_spill_count")
    return number("vgpr_count"), 4 * spilled + number("private_segment_fixed_size")


def _job(job: tuple[int, str]) -> Report:
    return compile_for(variants(job[1] in SMALL)[job[0]], job[1])


def chosen(target: str, only: str, spread: bool) -> list[int]:
    """Numbers of the variants for a target whose names contain `only`; with `spread`, one of each name in SPREAD."""
    found = {i: variant.name for i, variant in enumerate(variants(target in SMALL)) if only in variant.name}
    if not spread:
        return list(found)
    return list({name: i for i, name in found.items() if name in SPREAD}.values())


def reports(jobs: Sequence[tuple[int, str]], workers: int) -> Iterable[Report]:
    """Compile (number of a variant, target)."""
    if workers <= 1:
        yield from map(_job, jobs)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(_job, jobs)


def table(found: Sequence[Report]) -> str:
    """Registers by kernel and target as Markdown."""
    targets = list(dict.fromkeys(r.target for r in found))
    lines = ["| kernel | " + " | ".join(f"sm_{t}" if t.isdigit() else t for t in targets) + " |"]
    lines.append("|---|" + "--:|" * len(targets))
    by_name: dict[str, dict[str, Report]] = {}
    for report in found:
        worst = by_name.setdefault(report.kernel, {})
        known = worst.get(report.target)
        if known is None or (known.ok and (not report.ok or report.registers > known.registers)):
            worst[report.target] = report
    for name, cells in by_name.items():
        lines.append(f"| {name} | " + " | ".join(_cell(cells.get(t)) for t in targets) + " |")
    return "\n".join(lines)


def _cell(report: Report | None) -> str:
    if report is None:
        return "-"
    if report.error:
        return "not compiled"
    shared = f", {report.shared_bytes / 1024:.1f} KiB" if report.shared_bytes else ""
    return f"{report.registers}{shared}" + (f", spills {report.spilled_bytes} B" if report.spilled_bytes else "")


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(SHARED_BYTES), help="compute capabilities and AMD GPUs")
    parser.add_argument("--spread", action="store_true", help="one kernel of each family")
    parser.add_argument("--only", default="", help="kernels whose names contain this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the table to {DOC.name}")
    options = parser.parse_args(argv)
    targets = options.targets.split(",")
    if unknown := sorted(set(targets) - set(SHARED_BYTES)):
        parser.error(f"There is no target {unknown[0]}; there are {', '.join(SHARED_BYTES)}.")
    jobs = [(i, target) for target in targets for i in chosen(target, options.only, options.spread)]
    found = []
    for report in reports(jobs, options.workers):
        if not found or found[-1].target != report.target:
            print(
                f"{report.target}: {sum(job[1] == report.target for job in jobs)} kernels", file=sys.stderr, flush=True
            )
        found.append(report)
        if not report.ok:
            print(f"{report.kernel} for {report.target}: {report.error or _cell(report)}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([asdict(report) | {"ok": report.ok} for report in found], indent=1))
    elif not options.write:
        print(table(found))
    if options.write:
        _write(found)
    return 0 if all(report.ok for report in found) else 1


def _write(found: Sequence[Report]) -> None:
    import triton

    text = DOC.read_text(encoding="utf-8")
    head, _ = text.split(MARK)
    made = f"Triton {triton.__version__}, registers of a thread and shared memory of a block:\n\n{table(found)}\n"
    DOC.write_text(f"{head}{MARK}\n{made}", encoding="utf-8")


MARK = "<!-- written by scripts/kernel_report.py -->"


def as_json(argv: Sequence[str]) -> Any:
    """`main --json` in a process of its own, parsed: one where Triton compiles instead of interpreting."""
    import os
    import subprocess

    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "scripts.kernel_report", "--json", *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=DOC.parent.parent, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
