"""A picture as SVG. Shapes have roles instead of colours, so one drawing has a light and a dark version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import hypot, log

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
    "paper": palette.WHITE,
    "idle": palette.IDLE,
    "forward": palette.LIGHT_BLUE,
    "backward": palette.BLUE,
    "optimizer": palette.GREEN,
    "padding": palette.ORANGE,
    "read": palette.LIGHT_PURPLE,
    "add": palette.PURPLE,
    "exchange": palette.DEEP_PURPLE,
    "owned": palette.YELLOW,
    "label": "#14212e",
    **palette.MODES,
}
"""Colours of the roles on a light screen."""
DARK = {role: palette.DARK.get(colour, colour) for role, colour in LIGHT.items()} | {
    "ink": palette.DARK[palette.BLACK],
    "soft": palette.DARK[palette.GREY],
    "grid": "#4b525d",
    "panel": "#2b303b",
}
"""The same on a dark screen."""

_FONT = "-apple-system,BlinkMacSystemFont,Segoe UI,Helvetica,Arial,sans-serif"
_PLAIN = 0.56  # mean width of a letter, in sizes
_BOLD = 0.61


def number(value: float) -> str:
    """A coordinate with a tenth of a unit, as short as it can be."""
    text = f"{value:.1f}".removesuffix(".0")
    if text == "-0":
        return "0"
    return text


def bars(spans: Iterable[tuple[float, float]], top: float, height: float) -> str:
    """Rectangles as one path, which takes a third of the bytes: ``(left, right)`` of each."""
    tall = number(height)
    path = ""
    for left, right in spans:
        wide = number(right - left)
        path += f"M{number(left)} {number(top)}h{wide}v{tall}h-{wide}z"
    return path


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
        letter = _PLAIN
        if bold:
            letter = _BOLD
        wide = len(text) * size * letter
        before = {"start": 0.0, "middle": wide / 2, "end": wide}
        left = x - before[anchor]
        fits_across = left >= -1 and left + wide <= WIDTH + 1
        fits_down = size <= y + 1 <= self.height
        if not (fits_across and fits_down):
            raise ValueError(f"{text!r} does not fit into the picture {self.title!r}")
        attributes = f'x="{number(x)}" y="{number(y)}" class="{self._fill(role)}"'
        if anchor != "start":
            attributes += f' text-anchor="{anchor}"'
        if size != TEXT:
            attributes += f' font-size="{number(size)}"'
        if bold:
            attributes += ' font-weight="bold"'
        self._parts.append(f"<text {attributes}>{escape(text, quote=False)}</text>")

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
        corner = ""
        if rounded:
            corner = f' rx="{number(rounded)}"'
        classes = self._fill(role)
        if edge:
            classes += f" {self._stroke(edge)}"
        part = (
            f'<rect class="{classes}" x="{number(x)}" y="{number(y)}" width="{number(width)}" '
            f'height="{number(height)}"{corner}/>'
        )
        self._parts.append(part)

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
            length = hypot(x1 - x0, y1 - y0)
            along_x = (x1 - x0) / length
            along_y = (y1 - y0) / length
            base_x = x1 - 8 * along_x
            base_y = y1 - 8 * along_y
            left = (base_x - 4 * along_y, base_y + 4 * along_x)
            right = (base_x + 4 * along_y, base_y - 4 * along_x)
            points = [*points[:-1], (base_x, base_y)]
            tip = _path([(x1, y1), left, right])
            self.shape(f"{tip}z", role)
        dashes = ""
        if dash:
            dashes = f' stroke-dasharray="{dash}"'
        wide = ""
        if width != 1:
            wide = f' stroke-width="{number(width)}"'
        part = f'<path class="{self._stroke(role)} open" d="{_path(points)}"{wide}{dashes}/>'
        self._parts.append(part)

    def stroke(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        role: str,
        *,
        width: float = 1,
        dash: str = "",
        arrow: bool = False,
    ) -> None:
        """One straight line."""
        self.line([(x, y), (to_x, to_y)], role, width=width, dash=dash, arrow=arrow)

    def note(self, x: float, y: float, text: str, anchor: str = "start", *, role: str = "soft") -> None:
        """Small text."""
        self.text(x, y, text, role=role, size=SMALL, anchor=anchor)

    def dot(self, x: float, y: float, radius: float, role: str, *, hollow: bool = False) -> None:
        """A disc, or a ring."""
        if hollow:
            classes = f"{self._stroke(role)} open"
            wide = ' stroke-width="2"'
        else:
            classes = self._fill(role)
            wide = ""
        place = f'cx="{number(x)}" cy="{number(y)}"'
        self._parts.append(f'<circle class="{classes}" {place} r="{number(radius)}"{wide}/>')

    def add(self, part: str) -> None:
        """A piece of SVG as it is."""
        self._parts.append(part)

    def legend(self, y: float, entries: Mapping[str, str], *, left: float = 0) -> None:
        """A line of small boxes with text: roles by text."""
        for text, role in entries.items():
            self.box(left, y - 10, 11, 11, role)
            self.note(left + 16, y, text)
            left += 16 + len(text) * SMALL * _PLAIN + 10

    def svg(self, theme: Mapping[str, str]) -> str:
        """The file."""
        rules = ""
        for kind, role in sorted(self._rules):
            if kind == "fill":
                rules += f".{role}{{fill:{theme[role]}}}"
            else:
                rules += f".{role}-line{{stroke:{theme[role]}}}"
        width = number(WIDTH)
        height = number(self.height)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{round(WIDTH * SCALE)}" '
            f'height="{round(self.height * SCALE)}" viewBox="0 0 {width} {height}" '
            f'font-family="{_FONT}" font-size="{number(TEXT)}">'
        )
        title = f"<title>{escape(self.title, quote=False)}</title>"
        style = f"<style>.open{{fill:none;stroke-linejoin:round}}{rules}</style>"
        lines = [head, title, style, *self._parts, "</svg>"]
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
            x = self(value)
            for top, bottom in bands:
                canvas.stroke(x, top, x, bottom, "grid")
            if text:
                y = bands[-1][1] + below
                canvas.note(x, y, text, "middle")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
