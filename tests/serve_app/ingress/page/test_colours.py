"""The map's colours, in a browser: what stands on them can be read, and they are not kept for ever."""

import time
from typing import Any

from tests.serve_app.ingress.page.scene import node
from tests.serve_app.ingress.page.stage import Stage
from tests.serve_app.ingress.page.test_map import begin

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
"""Of the labels on bars, by WCAG's formula."""


def test_labels_can_be_read_on_every_colour(page: Any, stage: Stage) -> None:
    """4.5 to 1 (WCAG AA), in light and in dark, by tenant and by age."""
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


def test_colours_of_prefixes_long_gone_are_forgotten(page: Any, stage: Stage) -> None:
    """A page may stay open for weeks, and every conversation can have a colour."""
    begin(page, stage)
    known = page.evaluate(
        """async () => {
          const { Colours } = await import("./page/map/colours.js");
          const colours = new Colours();
          const hues = Array.from({ length: 10_000 }, (_, at) => colours.hue(`conversation ${at}`));
          return [colours.order.size, colours.hue("conversation 9999") === hues[9999]];
        }"""
    )
    assert known == [2048, True]
