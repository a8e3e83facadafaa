"""Pictures of the figures as plain SVG text: time against cap, and the timeline of one request."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from benchmarks.request_time_report import title
from benchmarks.request_time_shards import OURS, RESIDENT, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.request_time_figures import Figure, Group

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 212, 44, 52
# Told apart by people who do not see all colours, too; after Okabe and Ito.
INK, GRID, BOUND_COLOR, OURS_COLOR = "#1f2328", "#d8dee4", "#777777", "#0072b2"
COLORS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LANE_HEIGHT, LANE_GAP = 30, 22
TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    name: str
    points: tuple[tuple[float, float], ...]
    color: str
    dashes: str = ""
    has_dots: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """Maps caps in bytes (linear) and seconds (logarithmic) to the picture."""

    caps: tuple[float, float]
    seconds: tuple[float, float]

    def x(self, cap: float) -> float:
        low, high = self.caps
        return LEFT + (cap - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, seconds: float) -> float:
        low, high = (math.log(value) for value in self.seconds)
        return HEIGHT - BOTTOM - (math.log(seconds) - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)


def time_plot(found: Sequence[Figure], group: Group) -> str:
    """Return request time against cap: the best bound, ours, every peer, and all-resident as a line.

    Raises ValueError if nothing was measured under a cap.
    """
    series = _series([one for one in found if one.group == group])
    points = [point for one in series for point in one.points]
    if not points:
        raise ValueError(f"nothing was measured under a cap for {title(group)}, so that there is nothing to draw")
    caps = sorted({cap for cap, _ in points})
    seconds = [value for _, value in points]
    resident = next((one.resident_s for one in found if one.group == group and one.resident_s), None)
    every = [*seconds, *([resident] if resident else [])]
    axes = _Axes(caps=(min(0.0, caps[0]), caps[-1] * 1.05), seconds=(min(every) * 0.85, max(every) * 1.15))
    parts = [*_frame(axes, caps, f"Request time against the cap of device memory: {title(group)}")]
    if resident:
        series.append(
            _Series(
                name=f"all resident, no cap {resident:.2f} s",
                points=((axes.caps[0], resident), (axes.caps[1], resident)),
                color=INK,
                dashes="2 4",
                has_dots=False,
            )
        )
    for index, one in enumerate(series):
        parts += _line(axes, one, index)
    return _document(WIDTH, HEIGHT, parts)


def timeline_plot(figure: Figure) -> str:
    """Return when the link copies and when the device computes in one profiled request; raises KeyError without one."""
    timeline = figure.row["timeline"]
    span_ms = timeline["span_ms"] or 1.0
    lanes = (
        ("copies to the device", timeline["copies"], OURS_COLOR),
        ("computing", timeline["compute"], COLORS[1]),
        ("layers", [span[1:] for span in timeline["layers"]], COLORS[0]),
    )
    right = 24
    height = TOP + len(lanes) * (LANE_HEIGHT + LANE_GAP) + 40
    scale = (WIDTH - LEFT - right) / span_ms
    busy = timeline["busy_ms"]
    head = (
        f"{figure.name} of {title(figure.group)}: computes and copies {busy['both']:.0f} ms, only computes "
        f"{busy['compute_only']:.0f}, only copies {busy['copy_only']:.0f}, neither {busy['neither']:.0f}"
    )
    parts = [_text(LEFT, 24, head, size=13)]
    for index, (name, spans, color) in enumerate(lanes):
        y = TOP + 14 + index * (LANE_HEIGHT + LANE_GAP)
        parts.append(_text(LEFT, y - 4, name, size=11))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{span_ms * scale:.1f}" height="{LANE_HEIGHT}" fill="#f6f8fa"/>')
        for number, span in enumerate(spans):
            x, width = LEFT + span[0] * scale, max(0.2, (span[1] - span[0]) * scale)
            opacity = 1 if number % 2 else 0.7
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{LANE_HEIGHT}" fill="{color}" '
                f'fill-opacity="{opacity}"/>'
            )
    for tick in range(TICKS + 1):
        ms = span_ms * tick / TICKS
        parts.append(_text(LEFT + ms * scale, height - 14, f"{ms:.0f} ms", size=11, anchor="middle"))
    return _document(WIDTH, height, parts)


def _series(found: Sequence[Figure]) -> list[_Series]:
    times: dict[str, dict[int, list[float]]] = {}
    for one in found:
        cap, kind = one.row["cap_bytes"], one.row["kind"]
        if cap is None or kind == RESIDENT:
            continue
        if one.median_s is not None:
            times.setdefault(kind, {}).setdefault(cap, []).append(one.median_s)
        if one.best_bound_s is not None:
            times.setdefault("best bound", {}).setdefault(cap, []).append(one.best_bound_s)
    peers = [kind for kind in times if kind not in (OURS, "best bound")]
    looks = {"best bound": (BOUND_COLOR, "6 4"), OURS: (OURS_COLOR, "")}
    looks |= {kind: (COLORS[index % len(COLORS)], "") for index, kind in enumerate(peers)}
    return [
        _Series(
            name="residency" if kind == OURS else kind,
            points=tuple((float(cap), statistics.median(many)) for cap, many in sorted(times[kind].items())),
            color=color,
            dashes=dashes,
        )
        for kind, (color, dashes) in looks.items()
        if kind in times
    ]


def _frame(axes: _Axes, caps: Sequence[float], head: str) -> list[str]:
    parts = [_text(LEFT, 24, head, size=14)]
    bottom = HEIGHT - BOTTOM
    for second in _ticks(*axes.seconds):
        y = axes.y(second)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{second:g} s", size=11, anchor="end"))
    for cap in caps:
        parts.append(f'<path d="M{axes.x(cap):.1f} {bottom}v5" stroke="{INK}"/>')
        parts.append(_text(axes.x(cap), bottom + 20, size_text(int(cap)), size=11, anchor="middle"))
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="{INK}"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "cap of device memory", size=12, anchor="middle"))
    return parts


def _line(axes: _Axes, series: _Series, index: int) -> list[str]:
    places = [(axes.x(cap), axes.y(seconds)) for cap, seconds in series.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dash = f' stroke-dasharray="{series.dashes}"' if series.dashes else ""
    parts = [f'<path d="{path}" fill="none" stroke="{series.color}" stroke-width="2"{dash}/>']
    if series.has_dots:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{series.color}"/>' for x, y in places]
    x, y = WIDTH - RIGHT + 16, TOP + 10 + index * 20
    parts.append(f'<path d="M{x} {y}h22" stroke="{series.color}" stroke-width="2"{dash}/>')
    parts.append(_text(x + 28, y + 4, series.name, size=11))
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten within a range, or its ends if it holds none."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high] or [low, high]


def _text(x: float, y: float, text: str, *, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'


def _document(width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])
