"""What an operator's question names."""

from typing import Any

import pytest

from serve_app.ingress.observe.reports import names_in

NOBODY: Any = None


@pytest.mark.parametrize("body", [b"", b"[", b'{"model": "\xff"}', b'{"max_tokens": ' + 100_000 * b"["])
def test_a_body_that_cannot_be_read_names_nobody(body: bytes) -> None:
    assert names_in(body, NOBODY) == (None, None)
