"""Render HTML from templates/ and draw charts, for pages that need neither a server nor the network."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from speedrun import needs

with needs.packages("site"):
    import jinja2
    import pygal
    import pygaljs
    from markupsafe import Markup
    from pygal.style import Style

TEMPLATES = Path(__file__).with_name("templates")
ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True
)
TOOLTIPS = Path(pygaljs.path("latest", "pygal-tooltips.min.js"))  # shows the values of dots
Curves = Mapping[str, Sequence[tuple[float, float]]]
TICKS = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]  # of a logarithmic axis
MOST_DOTS = 100  # of a line: each takes half a kB
SIZES = dict.fromkeys((f"{text}_font_size" for text in "label major_label legend title tooltip".split()), 13)
STYLE = Style(font_family="inherit", **SIZES)
SHAPE = dict(width=720, height=420, margin=8, margin_bottom=40, dots_size=3, legend_at_bottom_columns=3)


def render(template: str, **values: object) -> str:
    """Fill in a template. Values are escaped, except for Markup."""
    return ENVIRONMENT.get_template(template).render(values)


def chart(curves: Curves, x_label: str, y_label: str, target: float | None = None, log: bool = False) -> Markup:
    """Draw lines as an SVG: dots show their values, a click on a name hides its line. `log` is of both axes."""
    lines, xs = dict(curves), [x for points in curves.values() for x, _ in points]
    if target is not None:
        lines[f"target {target:g}"] = [(min(xs), target), (max(xs), target)]
    name = hashlib.sha256(repr(lines).encode()).hexdigest()[:12]  # the same chart is the same text
    css = ["file://graph.css", "inline:"]
    for i, line in enumerate(lines):  # hues far apart; style.css has the other colors
        color = f"light-dark(oklch(.5 .13 {(hue := 250 + 137.5 * i)}), oklch(.78 .13 {hue}))"
        css[1] += f"#chart-{name} .color-{i} {{ stroke: {color}; fill: {color} }}"
        css[1] += f"#chart-{name} .serie-{i} .line {{ stroke-dasharray: 6 4 }}" * (line not in curves)
    drawn = pygal.XY(style=STYLE, css=css, js=[], legend_at_bottom=True, truncate_legend=-1, **SHAPE)
    drawn.uuid, drawn.x_title, drawn.y_title = name, x_label, y_label
    drawn.logarithmic, drawn.show_legend = log, len(lines) > 1
    drawn.value_formatter = drawn.x_value_formatter = "{:,.5g}".format
    if log:
        drawn.x_labels = [tick for tick in TICKS if min(xs) <= tick <= max(xs)]
    for line, points in lines.items():
        drawn.add(line, points, show_dots=line in curves and len(points) <= MOST_DOTS)
    return Markup(drawn.render(is_unicode=True).partition("?>")[2])


ENVIRONMENT.globals |= dict(chart=chart, tooltips=Markup(TOOLTIPS.read_text()))
