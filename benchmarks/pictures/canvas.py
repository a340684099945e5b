"""A picture as SVG. Shapes have roles instead of colours, so one drawing has a light and a dark version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import log

from lightning_odc.callbacks.timeline import palette

WIDTH = 440.0
"""Units from left to right: few, so that text is still large enough on a phone."""
SCALE = 1.2
"""Pixels of a unit where there is room."""
TEXT = 14.0
SMALL = 12.5
"""Sizes of text in units."""

LIGHT = {
    "ink": "#1f2328",
    "soft": "#59636e",
    "grid": "#c8ccd1",
    "panel": "#f0f2f5",
    "paper": "#ffffff",
    "idle": palette.IDLE,
    "forward": palette.LIGHT_BLUE,
    "backward": palette.BLUE,
    "optimizer": palette.GREEN,
    "read": palette.ORANGE,
    "add": palette.RED,
    "publish": palette.LIGHT_PURPLE,
    "label": "#14212e",
    **palette.MODES,
}
"""Colours of the roles on a light screen."""
DARK = {role: palette.DARK.get(colour, colour) for role, colour in LIGHT.items()} | {
    "ink": "#e6e9ee",
    "soft": "#a3acb8",
    "grid": "#4b525d",
    "panel": "#2b303b",
    "paper": "#1e2129",
}
"""The same on a dark screen."""

_FONT = "-apple-system,BlinkMacSystemFont,Segoe UI,Helvetica,Arial,sans-serif"
_PLAIN = 0.56  # mean width of a letter, in sizes
_BOLD = 0.61


def number(value: float) -> str:
    """A coordinate with a tenth of a unit, as short as it can be."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def bars(spans: Iterable[tuple[float, float]], top: float, height: float) -> str:
    """Rectangles as one path, which takes a third of the bytes: ``(left, right)`` of each."""
    tall = number(height)
    return "".join(
        f"M{number(left)} {number(top)}h{number(right - left)}v{tall}h-{number(right - left)}z"
        for left, right in spans
    )


@dataclass
class Canvas:
    """A drawing, `WIDTH` units wide.

    Attributes:
        title: What it shows, for people who open the file alone.
        height: Its height in units.
    """

    title: str
    height: float
    _parts: list[str] = field(default_factory=list)
    _rules: set[tuple[str, str]] = field(default_factory=set)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        role: str = "ink",
        size: float = TEXT,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Text on the baseline ``y``.

        Raises:
            ValueError: it is too long for the picture.
        """
        wide = len(text) * size * (_BOLD if bold else _PLAIN)
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        if left < -1 or left + wide > WIDTH + 1 or not size <= y + 1 <= self.height:
            raise ValueError(f"{text!r} does not fit into the picture {self.title!r}")
        given = {
            "class": self._fill(role),
            "text-anchor": anchor if anchor != "start" else "",
            "font-size": number(size) if size != TEXT else "",
            "font-weight": "bold" if bold else "",
        }
        attributes = "".join(f' {name}="{value}"' for name, value in given.items() if value)
        self._parts.append(
            f'<text x="{number(x)}" y="{number(y)}"{attributes}>{escape(text, quote=False)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        role: str,
        *,
        edge: str = "",
        rounded: float = 0,
    ) -> None:
        """A filled rectangle, with an edge if ``edge`` is a role."""
        corner = f' rx="{number(rounded)}"' if rounded else ""
        classes = self._fill(role) + (f" {self._stroke(edge)}" if edge else "")
        self._parts.append(
            f'<rect class="{classes}" x="{number(x)}" y="{number(y)}" width="{number(width)}" '
            f'height="{number(height)}"{corner}/>'
        )

    def shape(self, path: str, role: str) -> None:
        """A filled path, such as `bars`."""
        if path:
            self._parts.append(f'<path class="{self._fill(role)}" d="{path}"/>')

    def line(
        self,
        points: Sequence[tuple[float, float]],
        role: str,
        *,
        width: float = 1,
        dash: str = "",
        arrow: bool = False,
    ) -> None:
        """Straight lines through the points; with an arrow's tip at the last one."""
        if arrow:
            (x0, y0), (x1, y1) = points[-2:]
            length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
            along = ((x1 - x0) / length, (y1 - y0) / length)
            across = ((y0 - y1) / length, (x1 - x0) / length)
            base = (x1 - 8 * along[0], y1 - 8 * along[1])
            sides = [(base[0] + side * 4 * across[0], base[1] + side * 4 * across[1]) for side in (1, -1)]
            points = [*points[:-1], base]
            self.shape(_path([(x1, y1), *sides]) + "z", role)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        wide = f' stroke-width="{number(width)}"' if width != 1 else ""
        self._parts.append(f'<path class="{self._stroke(role)} open" d="{_path(points)}"{wide}{dashes}/>')

    def dot(self, x: float, y: float, radius: float, role: str, *, hollow: bool = False) -> None:
        """A disc, or a ring."""
        classes = f"{self._stroke(role)} open" if hollow else self._fill(role)
        wide = ' stroke-width="2"' if hollow else ""
        self._parts.append(
            f'<circle class="{classes}" cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"{wide}/>'
        )

    def add(self, part: str) -> None:
        """A piece of SVG as it is."""
        self._parts.append(part)

    def legend(self, y: float, entries: Mapping[str, str], *, left: float = 0) -> None:
        """A line of small boxes with text: roles by text."""
        for text, role in entries.items():
            self.box(left, y - 10, 11, 11, role)
            self.text(left + 16, y, text, role="soft", size=SMALL)
            left += 16 + len(text) * SMALL * _PLAIN + 10

    def svg(self, theme: Mapping[str, str]) -> str:
        """The file."""
        rules = "".join(
            f".{role}{{fill:{theme[role]}}}" if kind == "fill" else f".{role}-line{{stroke:{theme[role]}}}"
            for kind, role in sorted(self._rules)
        )
        width = number(WIDTH)
        height = number(self.height)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{round(WIDTH * SCALE)}" '
            f'height="{round(self.height * SCALE)}" viewBox="0 0 {width} {height}" '
            f'font-family="{_FONT}" font-size="{number(TEXT)}">'
        )
        lines = [
            head,
            f"<title>{escape(self.title, quote=False)}</title>",
            f"<style>.open{{fill:none;stroke-linejoin:round}}{rules}</style>",
            *self._parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _fill(self, role: str) -> str:
        self._rules.add(("fill", role))
        return role

    def _stroke(self, role: str) -> str:
        self._rules.add(("stroke", role))
        return f"{role}-line"


@dataclass(frozen=True)
class Axis:
    """Values along x.

    Attributes:
        low: The value at the left end.
        high: The value at the right end.
        left: The place of the left end.
        right: The place of the right end.
        by_ratio: Whether equal ratios are equally far apart, instead of equal differences.
    """

    low: float
    high: float
    left: float = 12
    right: float = WIDTH - 12
    by_ratio: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value."""
        if self.by_ratio:
            share = log(value / self.low) / log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.left + share * (self.right - self.left)

    def draw(
        self, canvas: Canvas, ticks: Mapping[float, str], *bands: tuple[float, float], below: float = 15
    ) -> None:
        """Grid lines from top to bottom of each band, and text below the last one."""
        for value, text in ticks.items():
            for top, bottom in bands:
                canvas.line([(self(value), top), (self(value), bottom)], "grid")
            if text:
                y = bands[-1][1] + below
                canvas.text(self(value), y, text, role="soft", size=SMALL, anchor="middle")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
