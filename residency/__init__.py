"""Reversible, journaled weight residency for GPU inference workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from residency.errors import ResidencyError as ResidencyError
    from residency.gpu.placement import ComponentPlacement as ComponentPlacement
    from residency.gpu.placement import HostTier as HostTier
    from residency.gpu.placement import Mode as Mode
    from residency.gpu.placement import Placement as Placement
    from residency.gpu.workload import Workload as Workload
    from residency.http_app import ControlApp as ControlApp
    from residency.manager import Manager as Manager
    from residency.manager import attach as attach
    from residency.manager import limit_device as limit_device
    from residency.ranks import Ranks as Ranks
    from residency.report import Decision as Decision
    from residency.report import Report as Report
    from residency.statemachine.policy import Policy as Policy
    from residency.statemachine.ranks import RankLimits as RankLimits

_EXPORTS = {
    "ComponentPlacement": "residency.gpu.placement",
    "ControlApp": "residency.http_app",
    "Decision": "residency.report",
    "HostTier": "residency.gpu.placement",
    "Manager": "residency.manager",
    "Mode": "residency.gpu.placement",
    "Placement": "residency.gpu.placement",
    "Policy": "residency.statemachine.policy",
    "RankLimits": "residency.statemachine.ranks",
    "Ranks": "residency.ranks",
    "Report": "residency.report",
    "ResidencyError": "residency.errors",
    "Workload": "residency.gpu.workload",
    "attach": "residency.manager",
    "limit_device": "residency.manager",
}
__all__ = [
    "ComponentPlacement",
    "ControlApp",
    "Decision",
    "HostTier",
    "Manager",
    "Mode",
    "Placement",
    "Policy",
    "RankLimits",
    "Ranks",
    "Report",
    "ResidencyError",
    "Workload",
    "attach",
    "limit_device",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `import residency` needs neither torch nor SQLAlchemy."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'residency' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
