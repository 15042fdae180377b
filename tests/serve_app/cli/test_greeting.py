"""What a start prints to be pasted shows the model at its best."""

from __future__ import annotations

import json
import re

from serve_app.cli.greeting import greeting
from serve_app.config.app import AppConfig


def test_printed_requests_do_not_sample() -> None:
    text = greeting(AppConfig(model="demo", engine="simulated"), "127.0.0.1", 8000)
    [body] = re.findall(r"-d '(.*)'", text)
    assert json.loads(body)["temperature"] == 0
    assert re.search(r"completions\.create\([^)]*temperature=0\b", text)
