"""Pictures of the page at /: two questions about a long document and the map beside them, and moments of a recording.

Needs Chromium and its driver: `apt-get install chromium`, `pip install 'warmpath[browser]'`.
`python -m benchmarks page_shots [--url URL] [--recording FILE --at 20,70] [--dark] --out docs`
"""

from __future__ import annotations

import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.common.report import BenchmarkError, parser_of
from benchmarks.common.server import instance

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUESTIONS = ("May I sell what I build with it?", "And must I say what I changed?")
ANSWER_TOKENS = 40
SIZE = {"width": 1440, "height": 900}
_PATIENCE_MS = 300_000
_SETTLED_MS = 2_500
"""Until what happened last has reached the map, and stands still."""


def chat(page: Any, folder: Path) -> Path:
    """Ask two questions about the sample document; return the picture."""
    page.get_by_role("button", name="Load a sample document").click()
    page.locator("#system-note", has_text="characters").wait_for()
    page.locator("#max-tokens").evaluate(f"(field) => (field.value = {ANSWER_TOKENS})")
    for number, question in enumerate(QUESTIONS):
        page.get_by_label("Your message").fill(question)
        page.get_by_label("Your message").press("Enter")
        page.locator(".reuse").nth(number).get_by_text("reused:").wait_for()
    page.wait_for_timeout(_SETTLED_MS)
    page.locator("#log button").first.click()
    page.locator("#map-title").click()  # no focus ring in the picture
    return shot(page, folder / "page.png")


def moments(page: Any, recording: Path, at_s: list[float], folder: Path) -> list[Path]:
    """Open a recording; return a picture of each moment."""
    page.locator("#recording-file").set_input_files(recording)
    page.locator("#player").wait_for()
    pictures = []
    for number, moment_s in enumerate(at_s, 1):
        page.get_by_label("Time in the recording").fill(str(moment_s))
        page.wait_for_timeout(_SETTLED_MS)
        pictures.append(shot(page, folder / f"page_recording_{number}.png"))
    return pictures


def shot(page: Any, path: Path) -> Path:
    """Take a picture of what the window shows."""
    page.screenshot(path=path, animations="disabled")
    return path


def main() -> None:
    """Take what was asked for."""
    parser = parser_of(__doc__, "smollm2")
    parser.add_argument("--url", help="an instance that needs no key, instead of starting one")
    parser.add_argument("--recording", type=Path, help="a file of --record, in place of the chat")
    parser.add_argument("--at", type=lambda text: [float(part) for part in text.split(",")], default=[0.0])
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright  # an extra of its own
    except ImportError as error:
        raise BenchmarkError("the driver is missing: pip install 'warmpath[browser]'") from error
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise BenchmarkError("there is no Chromium: apt-get install chromium")
    with (
        nullcontext(options.url) if options.url else instance("--model", options.model) as url,
        sync_playwright() as driver,
    ):
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport=SIZE, color_scheme="dark" if options.dark else "light")
        page.set_default_timeout(_PATIENCE_MS)
        page.goto(url)
        page.locator(".replica").first.wait_for()
        options.out.mkdir(parents=True, exist_ok=True)
        if options.recording:
            pictures = moments(page, options.recording, options.at, options.out)
        else:
            pictures = [chat(page, options.out)]
        chromium.close()
    print(f"wrote {', '.join(map(str, pictures))}", file=sys.stderr)


if __name__ == "__main__":
    main()
