# SPDX-License-Identifier: Apache-2.0
"""Drawings in SVG, the same bytes on every machine, on a card of their own that is light or dark as the
reader's system is."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

#: Colours by name, light and dark: of the card, of text and lines, and of what is compared.
COLOURS = {
    "card": ("#ffffff", "#0d1117"),
    "ink": ("#24292f", "#e6edf3"),
    "soft": ("#57606a", "#9aa4af"),
    "rule": ("#d0d7de", "#3d444d"),
    "plain": ("#b3bac4", "#6e7781"),
    "plugin": ("#1f77b4", "#3d96d8"),
    "other": ("#e0861a", "#e69b3c"),
    "moving": ("#2e8b57", "#3fb27f"),
}
#: Of eight ranks; far apart for colour-blind readers too, and dark enough for white digits.
RANKS = ("#0072b2", "#c26a00", "#00835f", "#b3558d", "#3f92c4", "#c44a10", "#7a6318", "#6a51a3")
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"


class Drawing:
    """A card of a size in pixels; x to the right, y down."""

    def __init__(self, width: int, height: int, title: str) -> None:
        """Args:
        title: what the picture shows, for who cannot see it.
        """
        self._width, self._height, self._title = width, height, title
        self._parts: list[str] = []
        self.rect(0.5, 0.5, width - 1, height - 1, "card", outline="rule", radius=8)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, outline: str = "", radius: float = 0
    ) -> None:
        """Args:
        fill, outline: a name of COLOURS or "#rrggbb"; "none".
        """
        round_ = f' rx="{_n(radius)}"' if radius else ""
        self._add("rect", f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"{round_}', fill, outline)

    def shape(self, points: list[tuple[float, float]], fill: str) -> None:
        """A filled polygon."""
        self._add("polygon", f'points="{" ".join(f"{_n(x)},{_n(y)}" for x, y in points)}"', fill)

    def line(
        self, x: float, y: float, to_x: float, to_y: float, colour: str = "rule", *, dashed: bool = False
    ) -> None:
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._add("line", f'x1="{_n(x)}" y1="{_n(y)}" x2="{_n(to_x)}" y2="{_n(to_y)}"{dashes}', "none", colour)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        colour: str = "ink",
        size: int = 13,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Args:
        y: of the base line.
        anchor: "start", "middle" or "end", which is at x.
        """
        weight = ' font-weight="600"' if bold else ""
        self._add(
            "text", f'x="{_n(x)}" y="{_n(y)}" font-size="{size}" text-anchor="{anchor}"{weight}', colour, "", words
        )

    def key(self, x: float, y: float, entries: list[tuple[str, str]], step: float) -> None:
        """What colours mean: squares with words, so far apart."""
        for at, (colour, words) in enumerate(entries):
            self.rect(x + at * step, y - 11, 13, 13, colour, radius=2)
            self.text(x + at * step + 19, y, words)

    def save(self, path: Path) -> None:
        path.write_text(str(self), encoding="utf-8")

    def __str__(self) -> str:
        light, dark = ("".join(_rules(name, pair[i]) for name, pair in COLOURS.items()) for i in range(2))
        style = f"{light}@media (prefers-color-scheme:dark){{{dark}}}"
        size = f'width="{self._width}" height="{self._height}" viewBox="0 0 {self._width} {self._height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{_FONT}">'
        return "\n".join(
            [head, f"<title>{escape(self._title)}</title>", f"<style>{style}</style>", *self._parts, "</svg>\n"]
        )

    def _add(self, kind: str, attributes: str, fill: str, outline: str = "", words: str = "") -> None:
        classes = [f"{letter}-{name}" for letter, name in (("f", fill), ("s", outline)) if name in COLOURS]
        own = [
            f'{key}="{name}"' for key, name in (("fill", fill), ("stroke", outline)) if name and name not in COLOURS
        ]
        told = [f'class="{" ".join(classes)}"'] if classes else []
        begin = " ".join([f"<{kind}", *told, *own, attributes])
        self._parts.append(f"{begin}>{escape(words)}</{kind}>" if words else f"{begin}/>")


def _rules(name: str, colour: str) -> str:
    return f".f-{name}{{fill:{colour}}}.s-{name}{{stroke:{colour}}}"


def _n(value: float) -> str:
    """A tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0")
