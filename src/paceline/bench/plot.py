"""Small line charts as inline SVG: no script, no network, readable in light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 280, 52, 110, 28, 40
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#65a30d")


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: str
    y: str
    series: Mapping[str, Seq[tuple[float, float]]]
    base: float | None = None  # a dashed line at this height, e.g. 1 = as fast as without
    top: float | None = None  # where the y axis ends, if that is known

    @property
    def single(self) -> bool:
        """All points lie at one x: there is no line to draw, the table says it better."""
        return len({x for line in self.series.values() for x, _ in line}) < 2


def svg(chart: Chart) -> str:
    """The chart as one <svg> element; an empty one says that there is no data."""
    points = [p for line in chart.series.values() for p in line]
    head = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">'
        f'<text x="{LEFT}" y="16" class="title">{escape(chart.title)}</text>'
    )
    if not points:
        return f'{head}<text x="{LEFT}" y="60">not measured</text></svg>'
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    y1 = chart.top or _round_up(max([y for _, y in points] + ([chart.base] if chart.base else [])))
    across = (WIDTH - LEFT - RIGHT) / ((x1 - x0) or 1)
    up = (HEIGHT - TOP - BOTTOM) / y1

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - x0) * across, HEIGHT - BOTTOM - y * up

    parts = [head, *_grid(chart, y1, sorted({x for x, _ in points}), place)]
    for i, (name, line) in enumerate(chart.series.items()):
        colour = COLOURS[i % len(COLOURS)]
        spots = [place(x, y) for x, y in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        key = TOP + 14 + 16 * i
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{key}" fill="{colour}">{escape(name)}</text>')
    return "".join(parts) + "</svg>"


def _round_up(value: float) -> float:
    """The next number of the form 4, 8, 12, 20, 40 times a power of ten: its quarters are short."""
    if value <= 0:
        return 1.0
    power = 10.0 ** (math.floor(math.log10(value)) - 1)
    return next(
        n * power for n in (10, 12, 16, 20, 24, 28, 32, 40, 60, 80, 100) if n * power >= value * 0.9999
    )


def _grid(chart: Chart, y1: float, xs: list[float], place) -> list[str]:  # type: ignore[no-untyped-def]
    parts = []
    for i in range(5):
        value = y1 * i / 4
        x, y = place(xs[0], value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    step = max(len(xs) // 8, 1)
    for value in xs[::step]:
        x, y = place(value, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{value:g}</text>')
    if chart.base is not None:
        _, y = place(xs[0], chart.base)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="base"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x)}</text>')
    parts.append(f'<text x="12" y="{HEIGHT / 2}" transform="rotate(-90 12 {HEIGHT / 2})" '
                 f'text-anchor="middle">{escape(chart.y)}</text>')  # fmt: skip
    return parts
