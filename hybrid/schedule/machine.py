"""Machine: what the probe knows of this computer."""

from __future__ import annotations

from hybrid.schedule.limits import available_ram, cpu_quota, usable_cores

__all__ = ["available_ram", "cpu_quota", "usable_cores"]
