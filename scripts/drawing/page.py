"""What all charts share: colours, title, words for those who do not see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

WIDTH = 820

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1c2127 } .title { font-size: 17px; font-weight: 600 }
.quiet { fill: #5a6470; font-size: 12.5px } .group { font-weight: 600 }
.figure { font-variant-numeric: tabular-nums }
.paper { fill: #ffffff } .ours { fill: #2a6fd6 } .other { fill: #9aa5b1 } .third { fill: #c98a1b }
.range { stroke: #1c2127; stroke-width: 1.5 } .axis { stroke: #c4ccd4 }
.line.ours { fill: none; stroke: #2a6fd6 } .line.other { fill: none; stroke: #7c8894 }
.line { stroke-width: 2.5 } .guess { stroke-dasharray: 5 5 }
@media (prefers-color-scheme: dark) {
text { fill: #e6eaef } .quiet { fill: #a4afba }
.paper { fill: #14181d } .ours { fill: #79aaff } .other { fill: #66717d } .third { fill: #e0ab4b }
.range { stroke: #e6eaef } .axis { stroke: #3a434d }
.line.ours { stroke: #79aaff } .line.other { stroke: #98a4b0 } }
"""


class Chart(ABC):
    """A chart, which says in words what it shows."""

    title: str

    @property
    @abstractmethod
    def about(self) -> str:
        """A line below the title: when it was measured, and how."""

    @property
    @abstractmethod
    def said(self) -> str:
        """The figures in words."""

    @abstractmethod
    def draw(self) -> tuple[Sequence[str], int]:
        """Return the elements of the chart below its head, and its height."""

    @property
    def alt(self) -> str:
        """What the chart says, in words."""
        return f"{self.title}. {self.said}."

    def svg(self) -> str:
        """Return the chart as an SVG document."""
        parts, height = self.draw()
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f"aria-label={quoteattr(self.alt)}><style>{STYLE}</style>"
            f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>'
            f'<text class="title" x="16" y="28">{escape(self.title)}</text>'
            f'<text class="quiet" x="16" y="47">{escape(self.about)}</text>{"".join(parts)}</svg>\n'
        )


def short(value: float) -> str:
    """Return a figure with three digits, or all before its point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
