"""Budget: what a placement may take of both memories, and whether a Ledger stays within it."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.schedule.ledger import Ledger
from hybrid.schedule.limits import available_ram, total_ram

VRAM_RESERVE = 512 << 20
"""Bytes of VRAM left to the desktop unless `--vram-reserve` says otherwise."""
SLACK = 256 << 10
"""Beside one in a hundred: small things, such as tables that are made once."""
LEAST_MARGIN, MOST_MARGIN = 128 << 20, 1 << 30


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes that may be taken; what the desktop and the system need is off already."""

    vram_bytes: int | None = None
    """On the head's device; None: no limit of its own (an emulated device, whose bytes are RAM)."""
    ram_bytes: int

    def shortfall(self, ledger: Ledger) -> str | None:
        """What is missing, as a phrase; None where the placement fits both memories.

        The mapped file counts as RAM: with less, it would be read from the disk at every token.
        """
        memory = self.lacks(ledger)
        if memory == "VRAM":
            return _missing(memory, needed_vram(ledger), self.vram_bytes or 0)
        return _missing(memory, ledger.ram_bytes, self.ram_bytes) if memory else None

    def lacks(self, ledger: Ledger) -> str:
        """Which memory is too small, "VRAM" or "RAM"; empty where none is."""
        vram = self.vram_bytes if ledger.placement.n_gpu_layers else None
        if vram is not None and needed_vram(ledger) > vram:
            return "VRAM"
        return "RAM" if ledger.ram_bytes > self.ram_bytes else ""


def needed_vram(ledger: Ledger) -> int:
    """Bytes of the device that must be there for a placement to run for certain: the Ledger's, and what it may be off
    (up to 0.6 % was measured)."""
    return ledger.vram_bytes + ledger.vram_bytes // 100 + SLACK if ledger.vram_bytes else 0


def _missing(memory: str, needed: int, allowed: int) -> str:
    return f"{mib(needed - allowed)} of {memory} too little: needs {mib(needed)}, {mib(allowed)} may be used"


def ram_margin(total: int) -> int:
    """Bytes of RAM left to the system: a twentieth of what there is, 128 MiB at least and 1 GiB at most."""
    return min(max(total // 20, LEAST_MARGIN), MOST_MARGIN)


def ram_budget() -> int:
    """Bytes of RAM that may be taken now."""
    return max(0, available_ram() - ram_margin(total_ram()))


def mib(n_bytes: int) -> str:
    """Bytes for people: whole MiB (rounded up) below 10 GiB."""
    return f"{-(-n_bytes // 2**20):,} MiB" if n_bytes < 10 << 30 else f"{n_bytes / 2**30:,.1f} GiB"
