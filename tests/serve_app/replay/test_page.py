"""The page of a replay needs nothing but itself, shows every figure, and trusts no name."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.replay.page import page_of, shown_runs, write_page

CURVES = ("arrivals_per_s", "replicas", "starting", "queue", "ttft_p50_s", "ttft_p99_s", "hit_rate", "cost")
CHARTS = ["Arrivals", "Replicas", "TTFT, p50", "TTFT, p99", "Hit rate", "Queue", "Cost so far"]


class Page(HTMLParser):
    """Reads a page; every tag must be closed in order. ``texts``: by the tag around them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.append((self.open[-1], data))

    def all(self, tag: str) -> list[str]:
        return [text for inside, text in self.texts if inside == tag]


def curves_with(points: int, value: float | None = 1.0) -> dict[str, Any]:
    return {"at_s": [60.0 * place + 30.0 for place in range(points)], **{name: [value] * points for name in CURVES}}


def row_with(name: str, **more: Any) -> dict[str, Any]:
    figures = {
        "requests": 1000, "lost": 0, "replica_hours": 12.5, "within_target": 0.991, "ttft_mean_s": 0.25,
        "ttft_p50_s": 0.2, "ttft_p90_s": 0.4, "ttft_p99_s": 1.5, "hit_rate": 0.6, "hit_rate_before_changes": None,
        "hit_rate_after_changes": None, "changes": 0, "least_replicas": 2, "most_replicas": 3, "chosen": False,
    }  # fmt: skip
    return {"name": name, "model": "small", **figures, **more}


def report_with(names: list[str], points: int = 20, **more: Any) -> dict[str, Any]:
    return {
        "title": "Replay of a day", "file": "day.jsonl", "simulated": True, "made_at": "2026-11-30T08:00:00+00:00",
        "traffic": {
            "requests": 1000, "span_s": 7200.0, "tenants": 3, "models": ["small"], "prompt_tokens": 1_234_567,
            "output_tokens": 89_000, "unlimited_hit_rate": 0.75,
        },
        "rates": {"prefill_tokens_per_s": 20000.0, "decode_step_s": 0.012}, "warnings": ["no pool size"],
        "rows": [row_with(name, chosen=not place) for place, name in enumerate(names)], "target_ttft_s": 2.0,
        "recorded": None, "curves": {name: curves_with(points) for name in names},
        "verdict": ["Two replicas are enough."], "settings": "replicas: 2\npolicy: estimated_ttft\n", **more,
    }  # fmt: skip


def test_the_answer_comes_first_and_everything_is_there() -> None:
    html = page_of(report_with(["ours", "serve"]))
    page = Page(html)
    places = [
        html.index(f">{text}") for text in ("Two replicas are", "replicas: 2", "no pool size", "Traffic", "Results")
    ]
    assert places == sorted(places)
    assert page.all("h3") == CHARTS
    assert ("button", "Copy") in page.texts and 'id="settings">replicas: 2\npolicy: estimated_ttft\n</code>' in html
    assert {"1,234,567", "2 h 00 min", "75.0 %", "12.5", "99.1 %", "250 ms", "1.5 s"} <= {
        text for _, text in page.texts
    }
    assert "within target 2 s" in page.all("th") and page.all("title")[0] == "Replay of a day"
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in page.tags if tag == "th")
    drawings = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(drawings) == len(CHARTS) and all("to" in str(drawing["aria-label"]) for drawing in drawings)


def test_simulated_numbers_are_called_so_everywhere() -> None:
    captions = [text for text in Page(page_of(report_with(["ours"]))).all("p") if text.endswith(".")]
    assert len(captions) == len(CHARTS) and all("simulated" in caption.lower() for caption in captions)
    assert "simulated" not in page_of(report_with(["ours"], simulated=False)).lower()


def test_the_page_loads_nothing() -> None:
    html = page_of(report_with(["ours"]))
    assert not re.search(r"https?://|@import|url\(|<link|<img|<iframe|\ssrc=|\shref=", html)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    assert policy and script and "default-src 'none'" in policy[1]
    assert b64encode(sha256(script[1].encode()).digest()).decode() in policy[1]


ODD = '</title></script><script>alert(1)</script><img src=x onerror="alert(1)">\'"&amp;$title ${x} $$'


def odd(value: Any) -> Any:
    """Put odd characters into every text of a report."""
    if isinstance(value, str):
        return value + ODD
    if isinstance(value, list):
        return [odd(each) for each in value]
    if isinstance(value, dict):
        fixed = {*report_with([]), *report_with([])["traffic"], *row_with(""), *curves_with(1)}
        return {key if key in fixed else key + ODD: odd(each) for key, each in value.items()}
    return value


def test_text_from_the_report_is_only_text() -> None:
    """The tags of a page with odd names are those of one with plain names."""
    plain = report_with(["ours", "serve"], recorded=row_with("recorded"))
    strange = odd(plain)
    page, same = Page(page_of(strange)), Page(page_of(plain))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in same.tags]
    assert [list(attributes) for _, attributes in page.tags] == [list(attributes) for _, attributes in same.tags]
    assert f"serve{ODD}" in page.all("th") and f"Two replicas are enough.{ODD}" in page.all("li")


@given(st.text(st.characters(), max_size=30), st.one_of(st.none(), st.floats(), st.integers(0, 10**12)))
def test_any_name_and_any_value_make_a_page(name: str, value: float | None) -> None:
    report = report_with([name], points=3, title=name, price_per_hour=value, target_ttft_s=value)
    report["rows"][0] |= {"ttft_p99_s": value, "replica_hours": value}
    report["curves"][name] = curves_with(3, value)
    Page(page_of(report))


def test_a_file_of_any_name_is_written(tmp_path: Path) -> None:
    write_page(report_with(["größe"], file="odd \udc80 name"), tmp_path / "page.html")
    assert "größe" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize("more", [
    {}, {"rows": [row_with("ours")], "curves": {}}, {"rows": [row_with("ours")], "curves": {"ours": curves_with(0)}},
    {"rows": [row_with("ours")], "curves": {"ours": curves_with(1)}},
    {"rows": [row_with("ours")], "curves": {"ours": {"at_s": [1.0, 2.0]}}},
])  # fmt: skip
def test_missing_parts_leave_no_empty_headings(more: dict[str, Any]) -> None:
    page = Page(page_of({"simulated": True, **more}))
    assert ("Results" in page.all("h2")) == bool(more) and "Settings" not in page.all("h2")
    assert not [text for _, text in page.texts if text in ("None", "nan")]


def test_gaps_break_a_line_and_a_lone_value_is_a_dot() -> None:
    report = report_with(["ours"], points=5)
    report["curves"]["ours"]["ttft_p50_s"] = [1.0, None, 1.0, float("nan"), 1.0]
    html = page_of(report)
    drawn = re.findall(r'class="s0 strong" d="([^"]*)"', html[html.index("TTFT, p50") : html.index("TTFT, p99")])
    assert [path.count("M") for path in drawn] == [3] and "nan" not in drawn[0]


def test_runs_of_other_lengths_share_one_axis() -> None:
    """A run that ended earlier has no values afterwards; each is drawn at its own moments."""
    report = report_with(["ours", "serve"], points=4)
    report["curves"]["serve"]["at_s"] = [10.0, 30.0, 50.0, 70.0]
    html = page_of(report)
    bands = re.findall(r"<rect [^>]*><title>([^<]*)", html)
    assert 'class="s1" d="M41.7 ' in html and 'class="s0 strong" d="M125 ' in html
    assert bands[-1] == "3 min 30 s\nours: 1 h\nserve: –" and "serve: 1 h" in bands[-4]


def test_more_runs_than_colours_leave_the_chosen_and_the_best() -> None:
    names = [f"run{number}" for number in range(8)]
    report = report_with(names)
    for number, row in enumerate(report["rows"]):
        row |= {"chosen": number == 7, "within_target": 0.9 + number / 100, "replica_hours": 10.0}
    runs = [(row, report["curves"][row["name"]]) for row in report["rows"]]
    assert [row["name"] for row, _ in shown_runs(runs)] == ["run7", "run6", "run5", "run4", "run3", "run2"]
    page = Page(page_of(report))
    assert "6 of 8 runs are drawn: run7; run6; run5; run4; run3; run2." in page.all("p")
    assert [name for name in names if name in page.all("th")] == names


def test_each_model_has_its_charts() -> None:
    report = report_with([])
    report["rows"] = [row_with("ours"), row_with("ours", model="large")]
    report["curves"] = {"small: ours": curves_with(3), "large: ours": curves_with(3)}
    report["recorded"] = [row_with("recorded"), row_with("recorded", model="large")]
    page = Page(page_of(report))
    assert page.all("h3") == 2 * CHARTS and "model" in page.all("th")
    assert [text.strip() for text in page.all("h2") if "Over" in text] == ["Over time, small", "Over time, large"]
    assert page.all("td").count("large") == 2


def test_a_price_makes_hours_money() -> None:
    page = Page(page_of(report_with(["ours"], price_per_hour=2.5)))
    assert "cost" in page.all("th") and "31.25" in page.all("td")
    assert "Simulated. Money, added up." in page.all("p")


def test_eight_runs_stay_below_a_megabyte() -> None:
    report = report_with([f"estimated_ttft x{number} 400,000 +1,000,000 host" for number in range(8)], points=200)
    for curves in report["curves"].values():
        for number, name in enumerate(CURVES):
            curves[name] = [0.123456789 * (1 + (place * 7919 + number) % 97) for place in range(200)]
    assert len(page_of(json.loads(json.dumps(report))).encode()) < 1_000_000


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_and_lines_stand_out_in_light_and_dark() -> None:
    """WCAG AA: 4.5 for text, 3 for lines."""
    light, dark = re.findall(r":root \{(.*?)\}", page_of({}), re.DOTALL)
    for theme in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#\w{6});", theme))
        for name, least in {
            "ink": 4.5,
            "soft": 4.5,
            "mark": 4.5,
            "target": 3.0,
            **{f"s{n}": 3.0 for n in range(6)},
        }.items():
            for ground in ("paper", "sheet", "wash") if name in ("ink", "mark") else ("paper", "sheet"):
                low, high = sorted((_luminance(colours[name]), _luminance(colours[ground])))
                assert (high + 0.05) / (low + 0.05) >= least, (name, ground)
