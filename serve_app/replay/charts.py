"""Charts over time as SVG inside HTML that works without scripts, in any width.

The drawing is stretched to its box, so lines keep their width (``non-scaling-stroke``) and labels are HTML beside it.
Knows nothing of replays: lines go in, one ``<figure>`` comes out. Its styles are in page.html.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

Values = Sequence[float | None]

WIDTH, HEIGHT = 1000, 300
"""Of the drawing, in its own units."""
MOST_LINES = 6
"""As many can be told apart by colour and dash; page.html has a style for each."""
LOG_FROM = 10.0
"""A chart that may have a logarithmic scale gets one when its largest value is so many times its smallest."""
_NAME_LENGTH = 40
_TABLE_ROWS = 12
_LEAST = 1e-9
"""What is less is drawn as nothing, on its own or beside the largest value."""
_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line; None leaves a gap. ``above``: drawn thinly, too. ``strong``: thicker than others.

    ``at_s``: of its values, where they are not the chart's.
    """

    name: str
    values: Values
    at_s: Sequence[float] = ()
    above: Values = ()
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over ``at_s``, seconds from the start. ``form``: a value for people. ``steps``: no slopes between values.

    ``top``: the scale's end at least. ``may_log``: a logarithmic scale where values are far apart.
    """

    title: str
    caption: str
    at_s: Sequence[float]
    lines: Sequence[ChartLine]
    form: Callable[[float], str]
    steps: bool = False
    whole: bool = False
    may_log: bool = False
    top: float = 0.0
    target: float | None = None
    target_name: str = "target"


@dataclass(frozen=True, slots=True)
class Scale:
    """The vertical axis."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def part(self, value: float) -> float:
        """Return a value's height, 0 to 1."""
        if self.log:
            value = max(value, self.low)
            return min((log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low)), 1.0)
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def known(values: Iterable[float | None]) -> list[float]:
    """Return the values that are finite numbers."""
    return [value for value in values if value is not None and isfinite(value)]


def scale_of(values: Sequence[float], *, top: float = 0.0, whole: bool = False, may_log: bool = False) -> Scale:
    """Return the axis that holds all values, from 0 unless it is logarithmic."""
    positive = [value for value in values if value > 0.0]
    if may_log and positive and max(positive) > LOG_FROM * min(positive):
        return _log_scale(max(min(positive), max(positive) * _LEAST), max(positive))
    high = max([*values, top], default=0.0)
    if high < _LEAST:
        high = 1.0
    step = _nice(high / 4.0)
    if whole:
        step = max(float(ceil(step)), 1.0)
    count = max(ceil(high / step - 1e-9), 1)
    return Scale(0.0, count * step, tuple(number * step for number in range(count + 1)))


def _nice(step: float) -> float:
    power = 10.0 ** floor(log10(step))
    return next((each * power for each in (1.0, 2.0, 5.0) if each * power >= step * (1 - 1e-9)), 10.0 * power)


def _log_scale(least: float, most: float) -> Scale:
    marks = [each * 10.0**power for power in range(floor(log10(least)), ceil(log10(most)) + 1) for each in (1, 2, 5)]
    low = max((mark for mark in marks if mark <= least), default=least)
    high = min((mark for mark in marks if mark >= most), default=most)
    ticks = [mark for mark in marks if low <= mark <= high]
    if len(ticks) > 9:
        decades = [mark for mark in ticks if abs(log10(mark) - round(log10(mark))) < 1e-9]
        ticks = decades[:: ceil(len(decades) / 9)]
    return Scale(low, high, tuple(ticks), log=True)


def time_ticks(end_s: float) -> list[tuple[float, str]]:
    """Return at most seven moments from 0 to the end, with their labels."""
    step_s = next((step for step in _STEPS_S if end_s / step <= 6), 0) or _nice(end_s / 6)
    unit_s, unit = 1, "s"
    for from_s, size_s, name in ((60, 60, "min"), (1800, 3600, "h"), (86400, 86400, "d")):
        if step_s >= from_s:
            unit_s, unit = size_s, name
    return [(each * step_s, f"{each * step_s / unit_s:g} {unit}") for each in range(floor(end_s / step_s + 1e-9) + 1)]


def moment(at_s: float) -> str:
    """Return a time from the start for people."""
    whole = round(at_s)
    if whole < 60:
        return f"{at_s:.3g} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def short(name: str) -> str:
    """Return a name that does not blow up a chart."""
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1] + "…"


def figure(chart: Chart) -> str:
    """Return the chart as HTML: caption, legend, drawing, and a table of some of its values."""
    values = [each for line in chart.lines for each in known([*line.values, *line.above])]
    head = f"<figure><figcaption><h3>{escape(chart.title)}</h3><p>{escape(chart.caption)}</p></figcaption>"
    if not values or not chart.at_s:
        return head + '<p class="none">Nothing to show.</p></figure>'
    target = [] if chart.target is None else [chart.target]
    scale = scale_of([*values, *target], top=chart.top, whole=chart.whole, may_log=chart.may_log)
    return "".join((head, _legend(chart), _plot(chart, scale), '<p class="readout"></p>', _table(chart), "</figure>"))


def _legend(chart: Chart) -> str:
    items = [
        f"<li>{_swatch(f's{slot}' + ' strong' * line.strong)}{escape(short(line.name))}</li>"
        for slot, line in enumerate(chart.lines)
        if len(chart.lines) > 1
    ]
    if chart.target is not None:
        items.append(f"<li>{_swatch('target')}{escape(chart.target_name)} {escape(chart.form(chart.target))}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>' if items else ""


def _swatch(style: str) -> str:
    return f'<svg viewBox="0 0 26 8" width="26" height="8" aria-hidden="true"><path class="{style}" d="M1 4h24"/></svg>'


def _plot(chart: Chart, scale: Scale) -> str:
    end_s = _end_s(chart.at_s)
    height = {tick: _number(100.0 * (1.0 - scale.part(tick))) for tick in scale.ticks}
    across = [(_number(100.0 * at_s / end_s), label) for at_s, label in time_ticks(end_s)]
    grid = "".join(f"M0 {_y(scale, tick)}H{WIDTH}" for tick in scale.ticks)
    grid += "".join(f"M{_number(float(place) * WIDTH / 100)} 0V{HEIGHT}" for place, _ in across)
    paths = [f'<path class="grid" d="{grid}"/>']
    for slot, line in reversed(list(enumerate(chart.lines))):
        for values, style in ((line.above, " thin"), (line.values, " strong" * line.strong)):
            if drawn := path_of(line.at_s or chart.at_s, values, scale, end_s, steps=chart.steps):
                paths.append(f'<path class="s{slot}{style}" d="{drawn}"/>')
    if chart.target is not None:
        paths.append(f'<path class="target" d="M0 {_y(scale, chart.target)}H{WIDTH}"/>')
    ys = "".join(f'<span style="top:{place}%">{escape(chart.form(tick))}</span>' for tick, place in height.items())
    xs = "".join(f'<span style="left:{place}%">{escape(label)}</span>' for place, label in across)
    return (
        f'<div class="plot"><div class="ys" aria-hidden="true">{ys}</div>'
        f'<svg role="img" aria-label="{escape(_summary(chart))}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'preserveAspectRatio="none">{"".join(paths)}<g class="bands">{_bands(chart)}</g></svg>'
        f'<div class="xs" aria-hidden="true">{xs}</div></div>'
    )


def _end_s(at_s: Sequence[float]) -> float:
    """Return the end of the last window, whose middle is the last moment."""
    return max(at_s[-1] + (at_s[-1] - at_s[-2]) / 2.0 if len(at_s) > 1 else 2.0 * at_s[-1], 1e-9)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _y(scale: Scale, value: float) -> str:
    return _number(HEIGHT * (1.0 - scale.part(value)))


def path_of(at_s: Sequence[float], values: Values, scale: Scale, end_s: float, *, steps: bool) -> str:
    """Return a line's path: a new part behind each gap, and a dot for a value that stands alone."""
    parts: list[str] = []
    open_part, last_y = False, ""
    for place_s, value in zip(at_s, values, strict=False):
        if value is None or not isfinite(value):
            open_part = False
            continue
        x, y = _number(WIDTH * place_s / end_s), _y(scale, value)
        if not open_part:
            parts.append(f"M{x} {y}h0")
        elif not steps:
            parts.append(f"L{x} {y}")
        else:
            parts.append(f"H{x}" + (f"V{y}" if y != last_y else ""))
        open_part, last_y = True, y
    return "".join(parts)


def _told(chart: Chart, place: int) -> list[tuple[str, str]]:
    """Return each line's name and its value at a place, for people."""
    told = []
    for line in chart.lines:
        nearest = _nearest(line.at_s, chart.at_s[place]) if line.at_s else place
        value, above = _at(line.values, nearest), _at(line.above, nearest)
        text = "–" if value is None else chart.form(value)
        if value is not None and above is not None and above > value:
            text += f" + {chart.form(above - value)}"
        told.append((short(line.name), text))
    return told


def _nearest(moments: Sequence[float], at_s: float) -> int:
    """Return the place of the nearest moment, or one behind the last if it is over by then."""
    if at_s > _end_s(moments):
        return len(moments)
    after = bisect_left(moments, at_s)
    return after - (after > 0 and (after == len(moments) or at_s - moments[after - 1] < moments[after] - at_s))


def _at(values: Values, place: int) -> float | None:
    value = values[place] if place < len(values) else None
    return value if value is not None and isfinite(value) else None


def _bands(chart: Chart) -> str:
    """Return a band for each moment, with the values there: browsers show them without scripts."""
    end_s, found, start = _end_s(chart.at_s), [], 0.0
    for place, at_s in enumerate(chart.at_s):
        middle = WIDTH * at_s / end_s
        width = max(2.0 * (middle - start), 0.1)
        text = "\n".join([moment(at_s), *(f"{name}: {value}" for name, value in _told(chart, place))])
        where = f'x="{_number(start)}" width="{_number(width)}" height="{HEIGHT}"'
        found.append(f"<rect {where}><title>{escape(text)}</title></rect>")
        start += width
    return "".join(found)


def _summary(chart: Chart) -> str:
    """Return what the drawing shows, for those who cannot see it."""
    told = [
        f"{short(line.name)} {chart.form(min(values))} to {chart.form(max(values))}"
        for line in chart.lines
        if (values := known(line.values))
    ]
    return f"{chart.title} over {moment(_end_s(chart.at_s))}: " + "; ".join(told)


def _table(chart: Chart) -> str:
    step = ceil(len(chart.at_s) / _TABLE_ROWS)
    heads = "".join(f'<th scope="col">{escape(short(line.name))}</th>' for line in chart.lines)
    rows = "".join(
        f'<tr><th scope="row">{moment(chart.at_s[place])}</th>'
        + "".join(f"<td>{escape(value)}</td>" for _, value in _told(chart, place))
        + "</tr>"
        for place in range(0, len(chart.at_s), step)
    )
    return (
        f'<details><summary>Values</summary><div class="wide" role="region" tabindex="0" '
        f'aria-label="{escape(chart.title)}: values"><table><thead><tr><th scope="col">Time</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details>"
    )
