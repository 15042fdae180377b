"""Counts the files, folders and functions of this repository that one plain streamed chat runs through.

A profiler of every call runs in all processes of an instance with one replica. What an idle instance runs in
the same time does not count. Usage: `.venv/bin/python .ci/request_path.py [--list]`, half a minute.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOMS = tuple(f"{ROOT / room}{os.sep}" for room in ("router", "serve_app"))
FOLDER = "WARMPATH_REQUEST_PATH"
WINDOW_S = 4.0
SEEN_S = 1.5
CHAT = {
    "stream": True,
    "max_tokens": 16,
    "messages": [{"role": "system", "content": "You are brief. " * 60}, {"role": "user", "content": "Hello!"}],
}

Function = tuple[str, str]


def record() -> None:
    """Record the functions that this process calls while a file ``window`` is there; it names the next report."""
    folder = Path(os.environ[FOLDER])
    seen: set[Any] = set()
    recording = [False]

    def called(frame: FrameType, event: str, _: Any) -> None:
        if recording[0] and event == "call":
            seen.add(frame.f_code)

    def follow() -> None:
        window = ""
        while True:
            time.sleep(0.05)
            now = (folder / "window").read_text() if (folder / "window").exists() else ""
            if now != window:
                recording[0] = bool(now)
                if window:
                    ours = [(code.co_filename, code.co_qualname) for code in seen if code.co_filename.startswith(ROOMS)]
                    (folder / f"{window}-{os.getpid()}.json").write_text(json.dumps([" ".join(sys.orig_argv), ours]))
                seen.clear()
                window = now

    threading.Thread(target=follow, daemon=True).start()
    threading.setprofile(called)
    sys.setprofile(called)


def functions_of(folder: Path, window: str) -> set[Function]:
    """Return what all processes called in a window."""
    found: set[Function] = set()
    for report in folder.glob(f"{window}-*.json"):
        found |= {(path, name) for path, name in json.loads(report.read_text())[1]}
    return found


@contextmanager
def instance(environment: Mapping[str, str]) -> Iterator[str]:
    """Run an instance with one replica for the block, and yield its URL."""
    from serve_app.cli.local_ray import answers, held_port

    with held_port() as port:
        command = [sys.executable, "-m", "serve_app.cli.entry", "serve", "--port", str(port)]
        server = subprocess.Popen(
            [*command, "--model", "demo", "--replicas", "1"], cwd=ROOT, env={**os.environ, **environment},
            stdout=sys.stderr,
        )  # fmt: skip
        try:
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None, "the instance did not start"
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    """Run the instance and the chat, and print the counts."""
    sys.path.insert(0, str(ROOT))
    import httpx

    with tempfile.TemporaryDirectory(prefix="warmpath-path-") as made:
        folder = Path(made)
        (folder / "sitecustomize.py").write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport request_path\n"
            "sys.path.pop(0)\nrequest_path.record()\n"
        )
        paths = os.pathsep.join(filter(None, (made, os.environ.get("PYTHONPATH"))))
        with instance({"PYTHONPATH": paths, FOLDER: made}) as url:
            body = {**CHAT, "model": httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]}

            def chat() -> None:
                with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
                    assert answer.read().rstrip().endswith(b"[DONE]"), answer.text

            chat()  # what happens only once
            for window in ("idle", "chat"):
                (folder / "window").write_text(window)
                time.sleep(SEEN_S)
                if window == "chat":
                    chat()
                time.sleep(WINDOW_S)
                (folder / "window").unlink()
                time.sleep(SEEN_S)
        path = functions_of(folder, "chat") - functions_of(folder, "idle")
    files = defaultdict(list)
    for file, name in sorted(path):
        files[str(Path(file).relative_to(ROOT))].append(name)
    if "--list" in sys.argv:
        for file, names in files.items():
            print(file, *names, sep="\n    ")
    folders = {str(Path(file).parent) for file in files}
    print(f"a plain streamed chat runs through {len(files)} files, {len(folders)} folders and {len(path)} functions")


if __name__ == "__main__":
    main()
