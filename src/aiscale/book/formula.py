"""Prose of a notebook as HTML that needs no script, font or network: formulas become inline SVG.

to_html("The loss $\\mathcal{L}$ falls.")
"""

from __future__ import annotations

import html
import re
from functools import cache

from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

_SIZE_PX = 19
_DELIMITERS = re.compile(r"^\s*(\$\$|\\\[|\\\\\[)(.*?)(\$\$|\\\]|\\\\\])\s*$", re.S)


class _Renderer(IPythonRenderer):
    def inline_math(self, body: str) -> str:
        return _formula(body, inline=True)

    def block_math(self, body: str) -> str:
        return _formula(body, inline=False)

    def multiline_math(self, text: str) -> str:
        inner = _DELIMITERS.match(text)
        return _formula(inner[2] if inner else text, inline=False)

    def latex_environment(self, name: str, body: str) -> str:
        return _formula(rf"\begin{{{name}}}{body}\end{{{name}}}", inline=False)

    def block_mermaidjs(self, code: str) -> str:
        return f"<pre>{self.escape_html(code)}</pre>"  # mermaid would come from the network


def to_html(source: str, attachments: dict | None = None) -> str:
    """Markdown as HTML."""
    renderer = _Renderer(escape=False, attachments=attachments or {})
    return MarkdownWithMath(renderer=renderer).render(source)


@cache
def _formula(tex: str, inline: bool) -> str:
    """TeX as SVG, or as the TeX itself where it cannot be drawn."""
    tex = html.unescape(tex).strip()
    try:
        svg, below_px = _draw(tex, inline)
    except Exception:  # the parser of formulas raises whatever its parts raise
        return f'<code class="tex">{html.escape(tex)}</code>'
    label = html.escape(tex, quote=True)
    if not inline:
        return f'<span class="formula block" role="math" aria-label="{label}" tabindex="0">{svg}</span>'
    style = f"vertical-align:{below_px:.1f}px"
    return f'<span class="formula" role="math" aria-label="{label}" style="{style}">{svg}</span>'


def _draw(tex: str, inline: bool) -> tuple[str, float]:
    """The formula, and how far it reaches below the line (negative)."""
    import ziafont
    import ziamath

    ziafont.config.svg2 = False  # with SVG 2 glyphs have ids, which would be the same in several formulas of a page
    ziafont.config.precision = 2
    formula = ziamath.Latex(tex, size=_SIZE_PX, color="currentColor", inline=inline)
    return formula.svg(), formula.getyofst()
