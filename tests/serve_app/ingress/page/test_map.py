"""The cache map, in a browser: the replicas' prefixes, events about them, and their reasons."""

import time
from typing import Any

from tests.serve_app.ingress.page.scene import decision, node, replica, snapshot
from tests.serve_app.ingress.page.stage import Stage


def bars(page: Any, name: str) -> list[str]:
    """Return a replica's prefixes as a screen reader reads them."""
    return [bar.get_attribute("aria-label") for bar in page.locator(f"[data-id={name}] .bar:not(.out)").all()]


def lines(page: Any, which: str) -> list[str]:
    """Return the lines of a list, newest first."""
    return [line.split("\n")[-1] for line in page.locator(f"#{which} button").all_inner_texts()]


def begin(page: Any, stage: Stage, **more: Any) -> float:
    """Open the page on two replicas; return the time."""
    now_s = time.time()
    stage.snapshots = {"": [snapshot(now_s, **more)]}
    page.goto("/")
    page.locator(".replica").nth(1).wait_for()
    return now_s


def test_each_replica_has_its_prefixes_as_a_tree(page: Any, stage: Stage) -> None:
    """Bars are nested by prefix, as long as their tokens, with pins marked; a simulated engine is labelled."""
    begin(page, stage)
    assert bars(page, "r1") == [
        "clerk@1, 512 tokens",
        "system prompt of acme, 640 tokens, pinned",
        "conversation of acme, 320 tokens",
        "system prompt of globex, 896 tokens",
    ]
    assert bars(page, "r2")[0] == "clerk@1, 512 tokens"
    levels = [bar.get_attribute("aria-level") for bar in page.locator("[data-id=r1] .bar").all()]
    assert levels == ["1", "2", "3", "2"]
    page.wait_for_timeout(600)  # until bars have grown
    public, acme = (page.locator(f"[data-id=r1] [data-id={id}]").bounding_box() for id in ("p-clerk", "s-acme"))
    assert acme["x"] >= public["x"] + public["width"]
    assert public["height"] > acme["height"] * 1.5
    assert abs(acme["width"] / public["width"] - 640 / 512) < 0.06
    assert page.locator("#engine").inner_text().startswith("simulated")
    assert page.locator("#legend").inner_text().split() == ["globex", "public", "acme"]


def test_events_appear(page: Any, stage: Stage) -> None:
    """Decisions and actions are in two lists; new prefixes appear on the map, and a leaving replica's disappear."""
    now_s = begin(page, stage)
    grown = node("c-new", "s-acme", 1152, 48, {"r1": 48})
    stage.send(
        decision("one.0", now_s, pull_from="r2", pull_tokens=512),
        {"type": "prefixes", "at_s": now_s, "nodes": [grown]},
        {"type": "prefixes_gone", "at_s": now_s, "ids": ["c-acme"]},
        {"type": "evictions", "at_s": now_s, "replica": "r2", "blocks": 4, "seconds": 1.0},
        {"type": "pulls", "at_s": now_s, "replica": "r1", "pulls": {"done": 1}, "tokens": 512, "seconds": 0.1},
        {"type": "scale", "at_s": now_s, "from": 2, "target": 3, "reason": "ttft"},
        replica("r3", now_s, state="joining"),
        replica("r3", now_s),
        {"type": "something_new", "at_s": now_s},
    )
    page.locator("#incidents", has_text="Replica r3 joined").wait_for()
    assert lines(page, "incidents") == ["Replica r3 joined", "The autoscaler scales from 2 to 3 replicas"]
    assert lines(page, "requests") == [
        "Replica r1 pulled 512 tokens from another replica in 100 ms",
        "Replica r2 evicted 64 tokens to make room",
        "acme: 1,200 tokens to replica r1, 99 % reused",
    ]
    page.locator("[data-id=r3]").wait_for()
    page.locator("[data-id=c-acme]").wait_for(state="detached")
    assert "conversation 2 of acme, 48 tokens" in bars(page, "r1")
    page.locator("#lists-spoken", has_text="The autoscaler scales from 2 to 3 replicas").wait_for(state="attached")
    stage.send({"type": "replica_left", "at_s": now_s, "replica": "r2", "number": 2, "lost": False})
    page.locator("[data-id=r2]").wait_for(state="detached")
    page.locator("#incidents", has_text="Replica r2 left").wait_for()
    page.locator("[data-id=r1] [data-id=p-clerk]").click()
    assert "replica r1 and" not in page.locator("#why").inner_text()


def test_reasons_are_shown_for_any_selection(page: Any, stage: Stage) -> None:
    """It works for a bar, a replica and a decision; estimated figures are labelled so."""
    now_s = begin(page, stage)
    page.locator("[data-id=s-acme]").click()
    shown = page.locator("#why").inner_text()
    assert "can reuse the first 1,152 tokens" in shown
    assert "It is pinned" in shown
    page.get_by_role("button", name="replica r2", exact=True).click()
    assert "780 tokens/s, simulated" in page.locator("#why").inner_text()
    stage.send(decision("one.0", now_s, reason="load_spill", selected_cached_tokens=512, cached_tokens=512))
    page.locator("#requests button").first.click()
    shown = page.locator("#why").inner_text()
    assert "The replicas that held more of the prompt were too busy." in shown
    assert "Another replica held 672 more tokens of the prompt." in shown
    assert "1.54 s (estimated)" in shown
    assert "24 ms (simulated)" in shown


def test_the_keyboard_reaches_everything(page: Any, stage: Stage) -> None:
    begin(page, stage)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the cache map"
    page.keyboard.press("Enter")
    for wanted in ("replica r1", "clerk@1, 512 tokens"):
        page.keyboard.press("Tab")
        told = page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.textContent")
        assert told == wanted
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.id") == "c-acme"
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.id") == "s-globex"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.id") == "p-clerk"
    page.keyboard.press("Enter")
    page.locator("#why h4", has_text="clerk@1").wait_for()
    assert page.evaluate("document.activeElement.id") == "why"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.id") == "p-clerk"


def test_a_tenant_sees_only_its_part_from_the_server(page: Any, stage: Stage) -> None:
    """Fields that a tenant does not get are not requested, guessed or shown as undefined; two keys, two parts."""
    now_s = time.time()
    bare = [
        {"replica": name, "number": int(name[1]), "state": "serving", "engine": "torch", "simulated": False}
        for name in ("r1", "r2")
    ]
    own = [node("s-own", None, 0, 256, {"r1": 256}, kind="system", tenant="acme")]
    told = decision("one.0", now_s)
    for hidden in ("estimated_ttft_s", "cold_ttft_s", "queued_tokens"):
        del told[hidden]
    seen = snapshot(now_s, "tenant", "acme", replicas=bare, prefixes=own, simulated=False, decisions=[told])
    stage.snapshots = {"wp-acme": [seen], "wp-operator": [snapshot(now_s)]}
    page.goto("/")
    page.get_by_label("API key", exact=True).fill("wp-acme")
    page.get_by_label("API key", exact=True).press("Tab")
    page.locator("[data-id=s-own]").wait_for()
    assert "globex" not in page.content()
    page.get_by_role("button", name="replica r1", exact=True).click()
    page.locator("#requests button").first.click()
    shown = page.locator("body").inner_text()
    assert "undefined" not in shown
    assert "NaN" not in shown
    page.get_by_label("Key for the map").fill("wp-operator")
    page.get_by_label("Key for the map").press("Tab")
    page.locator("[data-id=s-globex]").first.wait_for()


def test_the_answer_names_its_replica_and_the_cost_without_a_cache(page: Any, stage: Stage) -> None:
    """The decision is found by the answer's id, in either order of arrival."""
    now_s = begin(page, stage)
    stage.held.clear()
    page.get_by_label("Your message").fill("Hello")
    page.get_by_label("Your message").press("Enter")
    page.get_by_text("Yes, you", exact=True).wait_for()
    stage.send(decision("answer1.0", now_s))
    stage.held.set()
    page.locator(".reuse button", has_text="replica r1").click()
    page.locator("#why h4", has_text="Why replica r1").wait_for()
    stage.bodies.append(stage.bodies[0])
    page.get_by_label("Your message").fill("And again")
    page.get_by_label("Your message").press("Enter")
    page.locator(".reuse").nth(1).get_by_text("reused").wait_for()
    stage.send(decision("answer3.0", now_s))
    page.locator(".reuse").nth(1).get_by_text("(estimated); simulated").wait_for()


def test_names_are_never_markup(page: Any, stage: Stage) -> None:
    """A tenant's, a replica's and a prompt's name come from others."""
    wrong = "<img src=x onerror=document.title='broken'>"
    now_s = begin(page, stage, prefixes=[node("p", None, 0, 512, {"r1": 512}, label=wrong)])
    stage.send(decision("one.0", now_s, tenant=wrong, replica=wrong, reason=wrong))
    page.locator("#requests button", has_text="<img").first.click()
    page.locator("[data-id=p]").click()
    assert page.locator("img").count() == 0
    assert page.title() == "warmpath"


def test_another_key_shows_nothing_of_the_previous_one(page: Any, stage: Stage) -> None:
    """The old data disappears when the key changes, even if the server does not answer at once."""
    now_s = begin(page, stage)
    stage.send(decision("one.0", now_s, tenant="globex"))
    page.locator("#requests button").first.click()
    page.locator("#why", has_text="globex").wait_for()
    stage.snapshots["wp-acme"] = []
    stage.busy = "There are already 4 event streams; close one first."
    page.get_by_text("Model and keys").click()
    page.get_by_label("API key", exact=True).fill("wp-acme")
    page.get_by_label("API key", exact=True).press("Tab")
    page.get_by_text("not connected; trying again").wait_for()
    page.wait_for_function("() => !document.querySelector('.replica')")
    assert "globex" not in page.content()


def test_text_can_be_dragged_into_a_field(page: Any, stage: Stage) -> None:
    """The page handles only other drops: it opens a file, and a link does not lead away from the chat."""
    begin(page, stage)
    taken = page.evaluate(
        """() => ["dragover", "drop"].map((type) => ["#say", "#stage"].map((place) => {
          const event = new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer: new DataTransfer() });
          event.dataTransfer.setData("text/plain", "some words");
          document.querySelector(place).dispatchEvent(event);
          return event.defaultPrevented;
        }))"""
    )
    assert taken == [[False, True], [False, True]]


def test_a_page_waits_for_a_busy_server_and_restores_a_lost_connection(page: Any, stage: Stage) -> None:
    """At first it shows the server's message, later the last known state. A busy server is not called lost."""
    stage.busy = "There are already 8 event streams; close one first."
    page.goto("/")
    page.get_by_text("close one first. The page keeps trying.").wait_for()
    stage.snapshots = {"": [snapshot(time.time())]}
    stage.busy = ""
    page.locator("[data-id=r2]").wait_for()
    stage.busy = "There are already 8 event streams; close one first."
    stage.snapshots = {"": [snapshot(time.time(), replicas=[replica("r9")])]}
    stage.hang_up()
    page.get_by_text("not connected; trying again").wait_for()
    assert page.locator(".replica").count() == 2
    stage.busy = ""
    page.locator("[data-id=r9]").wait_for()
    page.locator("[data-id=r1]").wait_for(state="detached")
    assert page.locator("#connection-text").inner_text() == "live"


def test_many_replicas_stay_readable(page: Any, stage: Stage) -> None:
    """Nothing is wider than the window, with 64 replicas and at a telephone's width."""
    begin(page, stage, replicas=[replica(f"r{index}") for index in range(1, 65)])
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.locator(".replica").count() == 64
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_without_motion_nothing_moves(page: Any, stage: Stage) -> None:
    """If the browser asks for less motion, there is none; the list shows the same."""
    page.emulate_media(reduced_motion="reduce")
    now_s = begin(page, stage)
    stage.send(decision("one.0", now_s, pull_from="r2", pull_tokens=512))
    page.locator("#requests button").wait_for()
    assert page.locator("#arcs path").count() == 0
    assert page.evaluate("document.getAnimations().filter((one) => one.playState === 'running').length") == 0


CONTRASTS = """() => {
  const pen = document.createElement("canvas").getContext("2d");
  const light = (colour) => {
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    const [red, green, blue] = [...pen.getImageData(0, 0, 1, 1).data].map((part) =>
      part <= 10 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
    return 0.05 + 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  return [...document.querySelectorAll(".bar span")].map((label) => {
    const both = [getComputedStyle(label).color, getComputedStyle(label.parentElement).backgroundColor].map(light);
    return Math.max(...both) / Math.min(...both);
  });
}"""
"""Returns the contrasts of labels on bars, by WCAG's formula."""


def test_labels_can_be_read_on_every_colour(page: Any, stage: Stage) -> None:
    """4.5 to 1 (WCAG AA), in light and in dark mode, by tenant and by age."""
    now_s = time.time()
    prefixes = [
        node(f"s{n}", None, 0, 512, {"r1": 512}, kind="system", tenant=f"t{n}", last_used_at_s=now_s - 30 * n**2)
        for n in range(9)
    ]
    begin(page, stage, prefixes=prefixes)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.locator(f"html[data-theme={scheme}]").wait_for(state="attached")
        for by in ("Age", "Tenant"):
            page.get_by_label(by, exact=True).check(force=True)
            found = page.evaluate(CONTRASTS)
            assert len(found) == 9
            assert min(found) >= 4.5, (scheme, by, found)


def test_colours_of_old_prefixes_are_forgotten(page: Any, stage: Stage) -> None:
    """A page may stay open for weeks, and every conversation can have a colour: only those that are shown are kept."""
    begin(page, stage)
    known = page.evaluate(
        """async () => {
          const { Colours } = await import("./page/map/colours.js");
          const colours = new Colours();
          for (let at = 0; at < 10_000; at += 1) colours.learn([null, `conversation ${at}`]);
          return [colours.slots.size, colours.groups.length];
        }"""
    )
    assert known == [1, 1]


def test_a_tenants_colour_depends_on_the_names_alone(page: Any, stage: Stage) -> None:
    """Not on the order in which they come. Up to 16 have different ones; with more, all have one."""
    begin(page, stage)
    ways = page.evaluate(
        """async () => {
          const { Colours } = await import("./page/map/colours.js");
          const look = (colours, name) => `${colours.hue(name)} ${colours.slotOf(name) >= 8}`;
          const told = (names, ...groups) => {
            const colours = new Colours();
            for (const some of groups) colours.learn(some);
            colours.learnTenants(names);
            return names.map((name) => look(colours, name));
          };
          const names = Array.from({ length: 16 }, (_, at) => `tenant ${at}`);
          const turned = told([...names].reverse(), ["tenant 3", null], ["tenant 9"]).reverse();
          const differ = [2, 3, 8, 12, 16].map((many) => new Set(told(names.slice(0, many))).size);
          const many = told(Array.from({ length: 200 }, (_, at) => `tenant ${at}`));
          return [told(names).join() === turned.join(), differ, many.every((one) => one.includes(" "))];
        }"""
    )
    assert ways == [True, [2, 3, 8, 12, 16], True]
