"""Line charts as SVG text, for model cards and the docs. No dependency, readable on light and dark pages."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 30, 40
COLOURS = ("#3b7dd8", "#d9662b", "#2f9e63", "#b04fb3", "#c9a227", "#c23b4e", "#3aa7a7", "#7a6fd0")

Points = Seq[tuple[float, float]]
Place = Callable[[float, float], tuple[float, float]]


def line_chart(title: str, x_label: str, series: Mapping[str, Points]) -> str:
    """An SVG with one line per series; the legend is at the right. Empty series are left out."""
    shown = {name: points for name, points in series.items() if points}
    xs = [x for points in shown.values() for x, _ in points] or [0.0, 1.0]
    ys = [y for points in shown.values() for _, y in points] or [0.0, 1.0]
    x_range, y_range = _widen(min(xs), max(xs)), _widen(min(ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (x - x_range[0]) / (x_range[1] - x_range[0]) * (WIDTH - LEFT - RIGHT)
        up = HEIGHT - BOTTOM - (y - y_range[0]) / (y_range[1] - y_range[0]) * (HEIGHT - TOP - BOTTOM)
        return round(right, 1), round(up, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="14" fill="#222222">{html.escape(title)}</text>',
        f'<text x="{(WIDTH - RIGHT + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle" '
        f'fill="#555555">{html.escape(x_label)}</text>',
        *_axes(x_range, y_range, place),
    ]
    for i, (name, points) in enumerate(shown.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{a},{b}" for a, b in (place(x, y) for x, y in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        height = TOP + 8 + 17 * i
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 12}" y="{height - 8}" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(
            f'<text x="{WIDTH - RIGHT + 27}" y="{height + 1}" fill="#222222">{html.escape(name)}</text>'
        )
    return "\n".join((*parts, "</svg>", ""))


def _axes(x_range: tuple[float, float], y_range: tuple[float, float], place: Place) -> list[str]:
    out = []
    for i in range(5):
        share = i / 4
        x, y = (low + share * (high - low) for low, high in (x_range, y_range))
        right, bottom = place(x, y_range[0])
        left, up = place(x_range[0], y)
        end, _ = place(x_range[1], y)
        out.append(f'<line x1="{left}" y1="{up}" x2="{end}" y2="{up}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 6}" y="{up + 4}" text-anchor="end" fill="#555555">{y:.3g}</text>')
        out.append(f'<text x="{right}" y="{bottom + 16}" text-anchor="middle" fill="#555555">{x:.4g}</text>')
    return out


def _widen(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)
