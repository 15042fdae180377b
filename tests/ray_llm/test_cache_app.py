"""The application beside Ray's shows each client only the part that its key allows."""

from contextlib import ExitStack
from itertools import islice

import httpx

from tests.integration.conftest import eventually
from tests.ray_llm.conftest import LlmApp, chat_body, key_of
from tests.ray_llm.test_paths import TEXT


def test_a_tenant_sees_its_own_part_and_the_operator_all(app: LlmApp) -> None:
    app.chat("seen. " + TEXT * 10, "seen")
    name = app.scopes.tenant_in(key_of("seen"))
    eventually(lambda: name in {total["tenant"] for total in app.cache("v1/cache/events?once=true").json()["totals"]})
    own = app.cache("v1/cache/events?once=true", "seen").json()
    assert (own["viewer"], own["tenant"], [total["requests"] for total in own["totals"]]) == ("tenant", name, [1])
    assert own["prefixes"] and all("queued_tokens" not in replica for replica in own["replicas"])
    other = app.cache("v1/cache/events?once=true", "other").json()
    assert (other["totals"], other["prefixes"], other["decisions"]) == ([], [], [])


def test_loads_are_for_the_operator_alone(app: LlmApp) -> None:
    for path in ("v1/cache/state", "metrics"):
        assert app.cache(path).status_code == 200
        assert app.cache(path, "a").status_code == 403
        assert "WARMPATH_OPERATOR_KEY" in app.cache(path, "").text
    assert app.cache("v1/cache/explain", "a", chat_body(TEXT)).status_code == 403
    assert "warmpath_unplaced_kv_blocks_total" in app.cache("metrics").text
    assert app.cache("v1/cache/explain", body={"model": "demo"}).json()["prompts"] == [{"routed_by_load": True}]
    assert app.cache("nothing").status_code == 404


def test_a_key_has_so_many_streams_and_no_more(app: LlmApp) -> None:
    url = f"{app.ray.url}/cache/v1/cache/events"
    with ExitStack() as stack:
        streams = [stack.enter_context(httpx.stream("GET", url, headers=key_of("a"), timeout=60)) for _ in range(5)]
        assert [stream.status_code for stream in streams] == [200] * 4 + [429]
        assert any("event: snapshot" in line for line in islice(streams[0].iter_lines(), 8))
    eventually(lambda: httpx.get(f"{url}?once=true", headers=key_of("a")).status_code == 200)


def test_the_page_chats_through_rays_own_door(app: LlmApp) -> None:
    assert "<title>warmpath</title>" in app.cache("").text
    assert app.cache("page/main.js").status_code == 200
    url = f"{app.ray.url}/cache"
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        assert browser.get(url).url.path == "/cache/"
        assert browser.get(f"{url}/v1/models").json()["data"][0]["id"] == "demo"
        answer = browser.post(f"{url}/v1/chat/completions", json=chat_body(TEXT), headers=key_of("a"))
    assert answer.json()["usage"]["completion_tokens"] == 4
