"""Both of Ray's paths to a replica: its ingress calls it, or HAProxy sends it the bytes where Ray's router says."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import eventually
from tests.ray_llm.conftest import LlmApp, cached, deployed, direct_streaming, unchanged

TEXT = "once upon a time there was a router that knew its caches "


@pytest.fixture(scope="module", params=["standard", "direct"])
def app(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path
) -> Iterator[LlmApp]:
    directory = tmp_path_factory.mktemp("ray_llm")
    environment = direct_streaming(directory) if request.param == "direct" else {}
    with deployed(directory, demo_model_path, 18710, unchanged, **environment) as app:
        yield app


def predicted(app: LlmApp, text: str, tenant: str) -> int:
    return int(app.explain(text, tenant)["replicas"][0]["cached_tokens"])


def test_cached_tokens_are_as_predicted_and_tenants_share_nothing(app: LlmApp) -> None:
    """Prompts of three tenants come and return in a pool that evicts."""
    draw = random.Random(1)
    texts = [f"{number}. " + TEXT * draw.randint(5, 40) for number in range(12)]
    right = hits = 0
    for number in range(120):
        text, tenant = draw.choice(texts), draw.choice("abc")
        if number < 12:
            assert predicted(app, text, f"stranger {number}") == 0
        told = predicted(app, text, tenant)
        answer = app.chat(text, tenant)
        right += told == cached(answer)
        hits += told > 0
        reached = (answer["usage"]["prompt_tokens"] - 1) // 32 * 32
        eventually(lambda text=text, tenant=tenant, reached=reached: predicted(app, text, tenant) == reached)
    assert right >= 119, f"{right} of 120"
    assert hits > 30


def test_load_is_spread_while_nothing_is_cached(app: LlmApp) -> None:
    state = app.state()
    assert len(state["replicas"]) == 2
    assert all(replica["blocks"] for replica in state["replicas"])


def test_what_cannot_be_followed_is_answered_and_counted(app: LlmApp) -> None:
    parts = [{"type": "text", "text": TEXT}, {"type": "text", "text": "x"}]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert "winners" in app.explain("", **body), "parts of text are text"
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    assert app.explain("", messages=[{"role": "user", "content": image}]) == {"routed_by_load": True}
