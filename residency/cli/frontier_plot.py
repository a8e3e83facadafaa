"""A picture of predicted time against memory, as an SVG file that needs nothing to be drawn."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from residency.rendering import duration, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.statemachine.planner.replanning import Point

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 48, 64  # margins
NUM_TICKS = 5
FONT = 'font-family="sans-serif" font-size="12"'
DASHED = 'stroke="#888" stroke-dasharray="4 4"'


def frontier_svg(points: Sequence[Point], *, title: str, marked_bytes: int | None = None) -> str:
    """Return the drawing: a step line of the points, what computing alone takes, and a mark at a cap.

    Raises ValueError without a point.
    """
    if not points:
        raise ValueError("there is no point to draw")
    most_bytes = max(point.cap_bytes for point in points)
    most_ns = max(point.duration_ns for point in points) * 1.05

    def x(num_bytes: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * num_bytes / most_bytes, 1)

    def y(num_ns: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * num_ns / most_ns, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for tick in range(NUM_TICKS + 1):
        at_bytes, at_ns = most_bytes * tick / NUM_TICKS, most_ns * tick / NUM_TICKS
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(at_ns)}" y2="{y(at_ns)}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y(at_ns) + 4}" text-anchor="end">{duration(at_ns)}</text>',
            f'<text x="{x(at_bytes)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{size(at_bytes)}</text>',
        ]
    compute_ns = points[-1].compute_ns
    parts += [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(compute_ns)}" y2="{y(compute_ns)}" {DASHED}/>',
        f'<text x="{WIDTH - RIGHT}" y="{y(compute_ns) - 6}" text-anchor="end" fill="#888">computing alone</text>',
    ]
    # More memory than a plan needs gives the same time, until the next plan fits.
    path = f"M {x(points[0].cap_bytes)} {y(points[0].duration_ns)}"
    for point in points[1:]:
        path += f" H {x(point.cap_bytes)} V {y(point.duration_ns)}"
    parts.append(f'<path d="{path}" fill="none" stroke="#1f6feb" stroke-width="2"/>')
    for point in points:
        label = escape(f"{size(point.cap_bytes)}: {duration(point.duration_ns)}")
        dot = f'<circle cx="{x(point.cap_bytes)}" cy="{y(point.duration_ns)}" r="3" fill="#1f6feb">'
        parts.append(f"{dot}<title>{label}</title></circle>")
    if marked_bytes is not None and marked_bytes <= most_bytes:
        at = x(marked_bytes)
        parts.append(f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#d29922"/>')
        parts.append(f'<text x="{at + 4}" y="{TOP + 12}" fill="#d29922">{size(marked_bytes)}</text>')
    parts += [
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 16}" text-anchor="middle">device memory</text>',
        f'<text x="16" y="{TOP - 8}">request time</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
