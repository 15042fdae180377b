"""The marks of every test that starts vLLM."""

from pathlib import Path

import pytest


def mark(items: list[pytest.Item], folder: Path) -> None:
    """Mark the tests of a folder. vLLM starts in half a minute on an idle machine, and in minutes on a busy one."""
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))
            # vLLM and its imports emit warnings of their own.
            item.add_marker(pytest.mark.filterwarnings("default"))
