# SPDX-License-Identifier: Apache-2.0
"""A page of figures and tables, and the drawing that figures are made of.

Horizontal places are shares of a figure's width, vertical ones pixels: so text stays as large on a phone as on a
desktop. Colours are classes, light or dark as the reader's system is.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

#: Colours by class, light and dark.
_COLOURS = {
    "back": ("#f6f8fa", "#0d1117"),
    "card": ("#ffffff", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9198a1"),
    "rule": ("#d1d9e0", "#3d444d"),
    "plain": ("#a8b1bb", "#6e7781"),
    "plugin": ("#1f77b4", "#4aa3e0"),
    "other": ("#d9730d", "#e69b3c"),
    "moving": ("#2e8b57", "#3fb27f"),
    "fifth": ("#8e5bb5", "#b38ad6"),
    "sixth": ("#b58900", "#d0b049"),
}
#: Of ranks, one after another: as in the charts of the docs.
RANKS = ("#0072b2", "#c26a00", "#00835f", "#b3558d", "#3f92c4", "#c44a10", "#7a6318", "#6a51a3")

_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,'Segoe UI',Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:24px;line-height:1.25;margin:0 0 4px}h2{font-size:17px;margin:0 0 2px}
p{margin:0;color:var(--soft);overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;margin:16px 0}
.tile,figure,section{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px 16px}
.tile b{display:block;font-size:22px;line-height:1.3}.tile span{color:var(--soft);font-size:13px}
figure,section{margin:0 0 16px}figure svg{display:block;overflow:visible;margin-top:10px}
.key{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;margin-top:6px}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
.scroll{overflow-x:auto;margin-top:8px}table{border-collapse:collapse;width:100%;font-size:14px;white-space:nowrap}
th,td{text-align:right;padding:5px 10px;border-bottom:1px solid var(--rule)}th{color:var(--soft);font-weight:600}
th:first-child,td:first-child,th.l,td.l{text-align:left}tr.ours td{font-weight:600}
svg text{font-size:12px;fill:var(--soft)}svg text.ink{fill:var(--ink)}svg line{stroke:var(--rule)}
svg line.dash{stroke:var(--ink);stroke-dasharray:4 4}
"""


class Figure:
    """A drawing with room for labels to its left and right."""

    def __init__(self, height: float, title: str, left: int = 56, right: int = 12) -> None:
        """Args:
        height: in pixels.
        title: what it shows, for who cannot see it.
        left, right: pixels for labels.
        """
        self._height, self._title, self._left, self._right = height, title, left, right
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, colour: str, *, tip: str = "", faint: bool = False
    ) -> None:
        """Args:
        x, width: shares of the width, 0 to 1.
        colour: a class or "#rrggbb".
        tip: said where the pointer rests.
        """
        more = ' fill-opacity="0.35"' if faint else ""
        end = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        size = f'width="{_share(width)}" height="{_px(height)}"'
        self._parts.append(f'<rect x="{_share(x)}" y="{_px(y)}" {size} {_fill(colour)}{more}{end}')

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str = "", *, dashed: bool = False) -> None:
        look = f' style="stroke:{_value(colour)};stroke-width:2"' if colour else ' class="dash"' if dashed else ""
        ends = f'x1="{_share(x)}" y1="{_px(y)}" x2="{_share(to_x)}" y2="{_px(to_y)}"'
        self._parts.append(f"<line {ends}{look}/>")

    def dot(self, x: float, y: float, colour: str, tip: str) -> None:
        where = f'cx="{_share(x)}" cy="{_px(y)}" r="4"'
        self._parts.append(f"<circle {where} {_fill(colour)}><title>{escape(tip)}</title></circle>")

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", *, shift: int = 0, ink: bool = False
    ) -> None:
        """Args:
        shift: pixels to the right.
        """
        look = ' class="ink"' if ink else ""
        move = f' dx="{shift}"' if shift else ""
        where = f'x="{_share(x)}" y="{_px(y)}"{move} text-anchor="{anchor}"'
        self._parts.append(f"<text {where}{look}>{escape(words)}</text>")

    def __str__(self) -> str:
        room = f"margin-left:{self._left}px;width:calc(100% - {self._left + self._right}px)"
        head = f'<svg role="img" aria-label="{escape(self._title)}" height="{_px(self._height)}" style="{room}">'
        return "".join([head, *self._parts, "</svg>"])


class Page:
    """A report, from top to bottom."""

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        """Args:
        lines: what the report is of.
        """
        self._title = title
        self._parts = [
            f"<header><h1>{escape(title)}</h1>{''.join(f'<p>{escape(line)}</p>' for line in lines)}</header>"
        ]

    def tiles(self, tiles: Sequence[tuple[str, str]]) -> None:
        """A few numbers, each with words."""
        shown = "".join(
            f'<div class="tile"><b>{escape(n)}</b><span>{escape(words)}</span></div>' for n, words in tiles
        )
        self._parts.append(f'<div class="tiles">{shown}</div>')

    def figure(self, name: str, title: str, words: str, drawing: Figure, key: Sequence[tuple[str, str]] = ()) -> None:
        """Args:
        name: the element's id.
        key: colours and what they mean.
        """
        entries = "".join(
            f'<span><i style="background:{_value(colour)}"></i>{escape(means)}</span>' for colour, means in key
        )
        legend = f'<div class="key">{entries}</div>' if key else ""
        head = f"<h2>{escape(title)}</h2><p>{escape(words)}</p>"
        self._parts.append(f'<figure id="{name}">{head}{legend}{drawing}</figure>')

    def table(self, title: str, rows: Sequence[Sequence[str]], ours: str = "") -> None:
        """Args:
        rows: the first is the head.
        ours: the first cell of the row to stand out.
        """
        head, *body = rows
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        lines = "".join(
            f"<tr{' class=ours' if row[0] == ours else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
            for row in body
        )
        table = f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
        self._parts.append(f'<section id="table"><h2>{escape(title)}</h2><div class="scroll">{table}</div></section>')

    def save(self, path: Path) -> None:
        """Raises:
        OSError: it cannot be written.
        """
        path.write_text(str(self), encoding="utf-8")

    def __str__(self) -> str:
        light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in _COLOURS.items()) for i in range(2))
        colours = f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
            f"<title>{escape(self._title)}</title><style>{colours}{_STYLE}</style></head>"
            f"<body><main>{''.join(self._parts)}</main></body></html>\n"
        )


def _value(colour: str) -> str:
    return f"var(--{colour})" if colour in _COLOURS else colour


def _fill(colour: str) -> str:
    return f'style="fill:{_value(colour)}"'


def _share(x: float) -> str:
    return f"{100 * x:.3f}".rstrip("0").rstrip(".") + "%"


def _px(y: float) -> str:
    return f"{y:.1f}".removesuffix(".0")
