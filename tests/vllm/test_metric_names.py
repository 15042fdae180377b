"""Each of the names that `vllm_metrics` adds is one that the installed vLLM serves, with labels of vLLM's."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from serve_app.ingress.observe.families import VLLM_FAMILIES

pytestmark = pytest.mark.vllm


def test_the_names_are_vllms() -> None:
    """A metric that vLLM renames would be on nobody's board."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    text = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    theirs = set(re.findall(r'name="(vllm:\w+)"', text))
    assert {name.removesuffix("_total") for name in VLLM_FAMILIES} <= theirs
    assert '["model_name", "engine"]' in text
    assert '"finished_reason"' in text
