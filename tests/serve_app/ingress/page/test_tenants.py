"""The table of tenants, in a browser: an operator's page opens on it; a row opens its requests and their reasons."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve_app.ingress.page.scene import (
    Event,
    decision,
    figure,
    idle,
    recording,
    refused,
    replica,
    snapshot,
    table,
    tenant,
    tenants,
    write,
)
from tests.serve_app.ingress.page.stage import Stage
from tests.serve_app.ingress.page.test_alarms import alarm, open_file
from tests.serve_app.ingress.page.test_map import begin
from tests.serve_app.ingress.page.test_sessions import session

LINES = "#tenants-rows > tr:not(.tenant-detail)"


def names(page: Any) -> list[str]:
    return [line.get_attribute("data-tenant") for line in page.locator(LINES).all()]


def cells(page: Any, name: str) -> dict[str, str]:
    """Return the texts of a tenant's row by column."""
    head = page.locator("#tenants-head th").all_inner_texts()
    row = page.locator(f"#tenants-rows [data-tenant='{name}'] > :is(th, td)").all_inner_texts()
    return dict(zip(head, row, strict=True))


def refusal(at_s: float, name: str = "globex") -> Event:
    told = {name_: value for name_, value in refused(name).items() if name_ != "requests"}
    return {"type": "refusal", "at_s": at_s, "used": 61_000, "most": 60_000, **told}


def opened(
    page: Any, stage: Stage, number: int = 3, key: str = "wp-operator", viewer: str = "operator", **more: Any
) -> float:
    """Open the page with a key, as one who came before; return the time."""
    now_s = time.time()
    own = None if viewer == "operator" else "acme"
    stage.snapshots = {key: [snapshot(now_s, viewer, own, **more)]}
    rows = tenants(number)
    told = (refused("globex"),) if viewer == "operator" else ()
    stage.tables = {key: table(*(rows if viewer == "operator" else rows[:1]), viewer=viewer, refusals=told)}
    stage.requests = {"globex": [refusal(now_s), decision("one.0", now_s - 1, tenant="globex")]}
    stage.sessions = {key: [session("00aa", "running", tenant="globex"), session("00bb", "running")]}
    page.add_init_script(f"sessionStorage.setItem('warmpath.key', {key!r})")
    page.goto("/")
    page.locator(LINES).nth(len(stage.tables[key]["data"]) - 1).wait_for()
    page.locator("#connection[data-state=live]").wait_for()
    return now_s


def test_an_operators_page_opens_on_the_tenants(page: Any, stage: Stage) -> None:
    """Rates, hit rate, times, refusals with their limit, cache of share, budget, money; the chat is folded away."""
    opened(page, stage)
    assert names(page) == ["acme", "globex", "initech"]
    assert cells(page, "globex") == {
        "tenant": "globex",
        "requests/s": "2.1",
        "tokens in/s": "2K",
        "cached/s": "1.7K",
        "out/s": "150",
        "hit rate": "31 %",
        "TTFT p50 · p95": "41 ms · 2.31 s",
        "end to end p50 · p95": "1.40 s · 4.20 s",
        "refused": "12 tokens_per_minute",
        "failed": "0",
        "cache held of share": "62K of 43.7K",
        "budget left": "14 % of 5M",
        "cost today": "12.5",
        "saved today": "0.5",
    }
    assert cells(page, "initech")["TTFT p50 · p95"] == "–"
    page.locator("body.no-chat").wait_for()
    assert not page.get_by_label("Your message").is_visible()
    assert page.get_by_text("An operator’s key cannot chat.").is_visible()
    top = page.locator("#tenants").bounding_box()["y"]
    assert top < page.locator("#replicas").bounding_box()["y"]
    assert top < 300


def test_a_proxy_that_adds_the_operators_key_needs_none_typed_in(page: Any, stage: Stage) -> None:
    """It has signed its user in. The chat is folded away until somebody gives a tenant's key."""
    page.set_extra_http_headers({"authorization": "Bearer wp-operator"})
    stage.snapshots = {"wp-operator": [snapshot(time.time(), keys=True)]}
    stage.tables = {"wp-operator": table(*tenants(3))}
    page.goto("/")
    page.locator(LINES).nth(2).wait_for()
    page.locator("body.no-chat").wait_for()
    assert page.get_by_text("An operator’s key cannot chat.").is_visible()
    assert not page.get_by_label("Your message").is_visible()


def test_a_row_opens_its_requests_refusals_misses_and_sessions(page: Any, stage: Stage) -> None:
    """Refused requests are listed too, each reason with its remedy; a selected request is explained."""
    opened(page, stage)
    page.get_by_role("button", name="globex", exact=True).first.click()
    detail = page.locator(".tenant-detail")
    detail.locator("table td", has_text="00aa").wait_for()
    shown = detail.inner_text()
    assert "00bb" not in shown, "another tenant's session"
    assert "tokens_per_minute 12 requests, in the ingress. Let it send shorter prompts" in shown
    assert "time 9 requests, 10,800 tokens computed again. Move the date or time." in shown
    lines = [line.split("\n")[-1] for line in detail.locator("button").all_inner_texts()]
    assert lines == ["globex: refused by tokens_per_minute", "globex: 1,200 tokens to replica r1, 99 % reused"]
    assert "4,300,000 of 5,000,000 tokens used this day" in shown
    detail.locator("button").first.click()
    page.locator("#why", has_text="raise its tokens_per_minute").wait_for()
    assert "61,000 of 60,000" in page.locator("#why").inner_text()
    page.get_by_role("button", name="acme", exact=True).first.click()
    page.locator(".tenant-detail", has_text="None since the server started.").wait_for()
    assert page.locator(".tenant-detail").count() == 1
    page.get_by_role("button", name="acme", exact=True).first.click()
    page.locator(".tenant-detail").wait_for(state="detached")


def test_the_alarm_of_refusals_names_tenant_limit_and_remedy(page: Any, stage: Stage) -> None:
    """It is a rule at work: apart from errors, in the header too. Its name opens the row."""
    now_s = opened(page, stage)
    row = figure(now_s, refused=12, failed=0)
    stage.send({"type": "totals", "at_s": now_s, "totals": [], "figures": [row], "minute": row}, key="wp-operator")
    line = alarm(page, "12 requests refused (429) in the last minute by tokens_per_minute. Let it send shorter")
    line.wait_for()
    assert "policy" in line.get_attribute("class")
    page.locator("#vital-refused.wrong", has_text="12").wait_for()
    assert page.locator("#vital-errors").inner_text() == "0"
    assert page.locator("#vital-errors.wrong").count() == 0
    line.get_by_role("button", name="globex").click()
    page.locator(".tenant-detail", has_text="tokens_per_minute").wait_for()
    many = tuple(refused(f"team-{at:03}", 40 - at) for at in range(20))
    stage.tables["wp-operator"]["refusals"] = list(many)
    alarm(page, "team-002: 38 requests refused").wait_for()
    assert page.locator("#alarms li.policy").count() == 4
    alarm(page, "of 17 tenants refused (429)").wait_for()


def test_refused_requests_are_in_the_list_of_requests(page: Any, stage: Stage) -> None:
    """Also those before the page was opened."""
    now_s = time.time()
    begin(page, stage, refusals=[{key: value for key, value in refusal(now_s - 5).items() if key != "type"}])
    page.locator("#requests .refusal", has_text="globex: refused by tokens_per_minute").wait_for()
    stage.send(refusal(now_s, "acme"))
    page.locator("#requests .refusal", has_text="acme: refused by tokens_per_minute").wait_for()
    assert page.locator("#incidents li").count() == 0


def test_columns_sort_the_table(page: Any, stage: Stage) -> None:
    """By a click, the largest first; by another, the smallest. The order stays when the numbers change."""
    opened(page, stage)
    page.locator("#tenants-head").get_by_role("button", name="TTFT p50 · p95").click()
    assert names(page) == ["globex", "acme", "initech"]
    page.locator("#tenants-head [aria-sort=descending]").wait_for()
    page.locator("#tenants-head").get_by_role("button", name="TTFT p50 · p95").click()
    assert names(page) == ["initech", "acme", "globex"]
    stage.tables["wp-operator"]["data"][0] |= {"ttft_p95_s": 9.0}
    page.wait_for_function("() => document.querySelector('#tenants-rows').textContent.includes('9.00 s')")
    assert names(page) == ["initech", "globex", "acme"]


def test_the_span_is_chosen_and_asked_for(page: Any, stage: Stage) -> None:
    opened(page, stage)
    page.get_by_label("Over the last").select_option("900")
    page.wait_for_function("() => true")
    page.evaluate("() => fetch('v1/models')")
    assert stage.asked_tables[0][1] == "60"
    assert stage.asked_tables[-1][1] == "900"


@pytest.mark.parametrize("width", [1440, 390])
def test_many_tenants_stay_readable(page: Any, stage: Stage, width: int) -> None:
    """Nothing is wider than the window; a name can be found; the head stays in view."""
    page.set_viewport_size({"width": width, "height": 900})
    opened(page, stage, 200)
    assert page.locator(LINES).count() == 200
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_label("Find a tenant").fill("-12")
    page.wait_for_function("() => document.querySelectorAll('#tenants-rows > tr').length === 10")
    page.get_by_label("Find a tenant").fill("nobody")
    assert page.get_by_text("No tenant has such a name.").is_visible()


def test_a_tenant_sees_its_own_row_alone(page: Any, stage: Stage) -> None:
    """And it can chat."""
    opened(page, stage, key="wp-acme", viewer="tenant")
    assert names(page) == ["acme"]
    assert page.locator("#tenants-title").inner_text() == "Your use"
    assert "initech" not in page.content()
    assert page.get_by_label("Your message").is_visible()


def test_another_key_sees_nothing_of_the_table_before(page: Any, stage: Stage) -> None:
    opened(page, stage)
    page.get_by_role("button", name="globex", exact=True).first.click()
    page.locator(".tenant-detail").wait_for()
    stage.snapshots["wp-acme"] = [snapshot(time.time(), "tenant", "acme", prefixes=[])]
    page.locator("#settings summary").click()
    page.get_by_label("API key", exact=True).fill("wp-acme")
    page.get_by_label("API key", exact=True).press("Tab")
    page.locator("#tenants").wait_for(state="hidden")
    assert page.locator("#tenants-rows tr").count() == 0
    assert page.locator("#tenants", has_text="globex").count() == 0


def test_a_recording_has_no_table(page: Any, stage: Stage, tmp_path: Path) -> None:
    """The server's tenants are not those of that time; its alarms are the recording's."""
    stage.tables = {"": table(*tenants(3))}
    open_file(page, write(tmp_path / "run.jsonl", recording()))
    page.locator("#tenants").wait_for(state="hidden")
    page.get_by_role("button", name="Back to live").click()
    page.locator("#tenants").wait_for(state="visible")


def test_at_a_telephones_width_the_tenants_come_before_the_chat(page: Any, stage: Stage) -> None:
    """Also in an open deployment, where everybody is an operator and can chat."""
    page.set_viewport_size({"width": 390, "height": 800})
    stage.tables = {"": table(tenant("default"))}
    begin(page, stage)
    page.locator(LINES).first.wait_for()
    page.locator("body.operator").wait_for()
    assert page.locator("#tenants").bounding_box()["y"] < page.locator(".chat").bounding_box()["y"]


def test_the_header_counts_the_replicas_that_live(page: Any, stage: Stage) -> None:
    """A silent one and a dead one do not serve."""
    now_s = begin(page, stage)
    page.locator("#vital-replicas", has_text="2").wait_for()
    stage.send(replica("r2", now_s, report_age_s=4.0))
    page.locator("#vital-replicas", has_text="1 of 2").wait_for()
    stage.send({"type": "replica_left", "at_s": time.time(), "replica": "r2", "number": 2, "lost": True})
    page.locator("[data-id=r2].lost").wait_for()
    assert page.locator("#vital-replicas").inner_text() == "1 of 2"


def test_every_key_has_links_to_the_api_the_metrics_and_the_documents(page: Any, stage: Stage) -> None:
    """Where a link would need a key, the page asks with its own."""
    opened(page, stage)
    stage.apis = ["wp-operator"]
    assert page.get_by_role("link", name="Docs").get_attribute("href") == "page/help.html"
    page.get_by_role("link", name="API").click()
    page.locator("#why", has_text="POST /v1/chat/completions").wait_for()
    page.get_by_role("link", name="Metrics").click()
    page.locator("#why h4", has_text="Metrics").wait_for()
    page.goto("/page/help.html")
    assert page.get_by_role("heading", name="Tenants").is_visible()


def test_names_of_tenants_are_never_markup(page: Any, stage: Stage) -> None:
    wrong = "<img src=x onerror=document.title='broken'>"
    row = {**tenant(wrong, refused=1), "refused_by": [{**refused(wrong), "limit": wrong}]}
    stage.tables = {"": table(row, idle("acme"), refusals=(refused(wrong),))}
    stage.requests = {wrong: [refusal(1.0, wrong)]}
    begin(page, stage)
    page.locator(LINES).first.locator("button").click()
    page.locator(".tenant-detail button", has_text="<img").wait_for()
    assert page.locator("img").count() == 0
    assert page.title() == "warmpath"


BUSY: Event = {
    "requests_per_s": 1234.5, "prompt_tokens_per_s": 123_456, "cached_tokens_per_s": 123_456, "hit_rate": 0.985,
    "output_tokens_per_s": 12_345, "ttft_p50_s": 12.31, "ttft_p95_s": 52.31, "e2e_p50_s": 112.4, "e2e_p95_s": 214.2,
    "kv_tokens": 1_234_567, "kv_share_tokens": 2_345_678, "today": {"cost": 12_345.67, "saved": 4_567.89},
}  # fmt: skip


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("width", [1280, 1366, 1440, 1920])
def test_money_and_limits_are_in_sight_on_a_laptop(page: Any, stage: Stage, width: int, chat: bool) -> None:
    """Nothing of the table is cut, beside the chat too; what it leaves out is in the open row."""
    page.set_viewport_size({"width": width, "height": 768})
    if chat:
        page.add_init_script("sessionStorage.setItem('warmpath.map-key', 'wp-operator')")
        stage.snapshots = {"wp-acme": [snapshot(time.time(), "tenant", "acme")]}
        page.add_init_script("sessionStorage.setItem('warmpath.key', 'wp-acme')")
        stage.snapshots["wp-operator"] = [snapshot(time.time())]
    else:
        page.add_init_script("sessionStorage.setItem('warmpath.key', 'wp-operator')")
        stage.snapshots = {"wp-operator": [snapshot(time.time())]}
    rows = tenants(3)
    rows[1] |= {**BUSY, "tenant": "customer-with-a-long-name"}
    stage.tables = {"wp-operator": table(*rows, viewer="operator", refusals=())}
    page.goto("/")
    page.locator(LINES).nth(2).wait_for()
    page.locator("body:not(.no-chat)" if chat else "body.no-chat").wait_for()
    cut = "() => { const box = document.querySelector('.tenants .scroll'); return box.scrollWidth - box.clientWidth; }"
    assert page.evaluate(cut) <= 0
    right = page.locator("#tenants .scroll").bounding_box()
    for name in ("budget left", "cost today", "saved today", "refused"):
        box = page.locator(f"#tenants-head [data-name='{name}']").bounding_box()
        assert right["x"] <= box["x"] and box["x"] + box["width"] <= right["x"] + right["width"] + 1
    page.get_by_role("button", name="customer-with-a-long-name").click()
    page.locator(".tenant-detail", has_text="requests").wait_for()
    shown = page.locator("#tenants .scroll").inner_text()
    assert all(name in shown for name in ("tokens in/s", "cached/s", "out/s", "end to end p50 · p95", "12.3K"))


@pytest.mark.parametrize(
    ("limit", "used", "told", "whole"),
    [
        (0.01, 0.0086, "14 % of 0.01", "0.0086 of 0.01 money"),
        (0.000025, 0.0, "100 % of 0.000025", "0 of 0.000025 money"),
        (1234.5, 617.25, "50 % of 1,234.5", "617.25 of 1,234.5 money"),
    ],
)
def test_a_budget_of_money_has_its_digits(
    page: Any, stage: Stage, limit: float, used: float, told: str, whole: str
) -> None:
    opened(page, stage)
    row = stage.tables["wp-operator"]["data"][1]
    row["budget"] |= {"unit": "money", "limit": limit, "used": used, "left": limit - used}
    page.locator("#tenants-rows [data-tenant=globex]", has_text=told).wait_for()
    page.get_by_role("button", name="globex", exact=True).first.click()
    page.locator(".tenant-detail", has_text=whole).wait_for()
