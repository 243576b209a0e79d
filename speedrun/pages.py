"""Render HTML from templates/ and draw charts: pages that need neither a server nor the network."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speedrun import needs

with needs.packages("site"):
    import jinja2
    import pygal
    import pygaljs
    from markupsafe import Markup
    from pygal.style import Style

TEMPLATES = Path(__file__).with_name("templates")
MOST_DOTS = 100  # of a line: each takes half a kB
COLORS = 6  # of lines, in style.css
Points = Sequence[tuple[float, float]]


@functools.cache
def templates() -> jinja2.Environment:
    """Read the templates. All of them may use `css`, and `tooltips`, the script that shows values in charts."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    settings: dict[str, Any] = dict(autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, **settings)
    css, tooltips = TEMPLATES / "style.css", Path(pygaljs.path("latest", "pygal-tooltips.min.js"))
    environment.globals |= dict(css=Markup(css.read_text()), tooltips=Markup(tooltips.read_text()))
    return environment


def render(template: str, **values: object) -> str:
    """Fill in a template. Values are escaped, except for Markup."""
    return templates().get_template(template).render(values)


def chart(
    curves: Mapping[str, Points], x_label: str, y_label: str, *, target: float | None = None, log: bool = False
) -> Markup:
    """Draw lines as an SVG: dots show their values, and a click on a name hides its line. `log` is of both axes."""
    lines, xs = dict(curves), [x for points in curves.values() for x, _ in points]
    if target is not None:
        lines[f"target {target:g}"] = [(min(xs), target), (max(xs), target)]
    # Colors are in style.css, for light and dark; the size of text is that of its units
    sizes = dict(label_font_size=13, major_label_font_size=13, legend_font_size=14, title_font_size=14)
    guides = dict(guide_stroke_color="var(--rule)", major_guide_stroke_color="var(--rule)")
    dashes = dict(guide_stroke_dasharray="none", major_guide_stroke_dasharray="none")
    style = Style(colors=["none"] * COLORS, font_family="inherit", tooltip_font_size=13, **sizes, **guides, **dashes)
    settings: dict[str, Any] = dict(width=720, height=420, margin=8, margin_bottom=18, logarithmic=log, dots_size=3)
    settings |= dict(legend_at_bottom=True, legend_at_bottom_columns=3, show_legend=len(lines) > 1, truncate_legend=-1)
    drawn = pygal.XY(style=style, css=["file://graph.css"], js=[], x_title=x_label, y_title=y_label, **settings)
    drawn.uuid = hashlib.sha256(repr(lines).encode()).hexdigest()[:12]  # the same chart is the same text
    drawn.value_formatter = drawn.x_value_formatter = "{:,.5g}".format
    for name, points in lines.items():
        drawn.add(name, points, show_dots=name in curves and len(points) <= MOST_DOTS)
    return Markup(drawn.render(is_unicode=True).partition("?>")[2])
