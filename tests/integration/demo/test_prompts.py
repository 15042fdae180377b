"""Registered prompts by version: a promotion is warm for everybody, and a locked version never changes."""

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app
from tests.integration.conftest import eventually
from tests.integration.demo.conftest import CHAT, KEYS, Served, said

pytestmark = pytest.mark.integration

APIS = (CHAT, "/v1/responses", "/v1/messages")


def cut_over(served: Served, *arguments: str) -> str:
    """Return the output of `warmpath prompts` for the operator."""
    key = {"WARMPATH_OPERATOR_KEY": KEYS["operator"][0]}
    result = CliRunner().invoke(app, ["prompts", *arguments, "--url", served.url], env=key)
    assert result.exit_code == 0, result.output
    return result.output


def answered(served: Served, name: str, ref: str, path: str = CHAT, model: str = "demo") -> tuple[str, bool]:
    """Return the version that answered, and whether most of the prompt was cached."""
    body: dict[str, object] = {"model": model, "temperature": 0, "prompt_ref": ref}
    body |= {"messages": said(("user", "Hi")), "max_tokens": 1} if path != APIS[1] else {
        "input": "Hi", "max_output_tokens": 1
    }  # fmt: skip
    answer = served.post(path, name, **body).raise_for_status()
    usage = answer.json()["usage"]
    found = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = found["cached_tokens"] if found else usage["cache_read_input_tokens"]
    return answer.headers["x-warmpath-prompt"], cached > 200


def test_a_promoted_version_is_warm_for_everybody(served: Served) -> None:
    """It is warm from the first request, in every API, at every ingress, with an adapter in use, and after a roll-back.

    docs: prompts
    """
    assert "1 is promoted" in cut_over(served, "promote", "clerk@1")
    for path in APIS * 2:
        assert answered(served, "acme", "clerk", path) == ("clerk@1", True)
    eventually(lambda: answered(served, "acme", "clerk", model="pirate") == ("clerk@1", True))
    assert "2 is promoted; the one before was 1" in cut_over(served, "promote", "clerk@2")
    for name in ("acme", "globex"):
        for path in APIS * 2:
            assert answered(served, name, "clerk", path) == ("clerk@2", True)
    assert {answered(served, "acme", "clerk", model="pirate") for _ in range(6)} == {("clerk@2", True)}
    assert answered(served, "acme", "clerk@1")[0] == "clerk@1"
    assert "1 is promoted" in cut_over(served, "rollback", "clerk")
    assert {answered(served, "globex", "clerk") for _ in range(6)} == {("clerk@1", True)}
    assert "requests: hit rate" in cut_over(served, "status", "clerk")


def turns(served: Served, session: str) -> set[str]:
    """Return the versions that the turns of one conversation get, at both ingresses."""
    messages, versions = said(("user", f"I am {session}.")), set()
    for turn in range(3):
        answer = served.post(
            CHAT, "acme", model="demo", temperature=0, prompt_ref="clerk", max_tokens=2, messages=messages, user=session
        ).raise_for_status()
        versions.add(answer.headers["x-warmpath-prompt"])
        messages += [answer.json()["choices"][0]["message"], *said(("user", f"And turn {turn}?"))]
    return versions


def test_a_part_of_the_conversations_moves_to_a_version(served: Served) -> None:
    """Each conversation keeps its version in all of its turns; a larger share moves some, and none back; all, or back.

    The new version is warm before, and both show their requests, hit rates and times to first token.

    docs: prompts
    """
    cut_over(served, "promote", "clerk@1")
    assert "30 % of conversations get 2" in cut_over(served, "cutover", "clerk@2", "--to", "30")
    names = [f"session-{at}" for at in range(12)]
    few = {name: turns(served, name) for name in names}
    assert all(len(versions) == 1 for versions in few.values())
    assert set().union(*few.values()) == {"clerk@1", "clerk@2"}
    assert answered(served, "acme", "clerk@2") == ("clerk@2", True)
    cut_over(served, "cutover", "clerk@2", "--to", "70")
    many = {name: turns(served, name) for name in names}
    assert all(len(versions) == 1 for versions in many.values())
    moved = [name for name in names if many[name] == {"clerk@2"}]
    assert {name for name in names if few[name] == {"clerk@2"}} < set(moved)
    (shown,) = served.get("/v1/prompts?name=clerk", "operator").json()["data"]
    assert (shown["promoted"], shown["coming"], shown["percent"]) == ("1", "2", 70)
    for version in shown["versions"]:
        assert version["requests"] >= 3 and version["hit_rate"] > 0.5 and version["ttft_p50_s"] > 0
    metrics = served.get("/metrics", "operator").text
    for name in ("requests", "ttft_seconds"):
        assert f"warmpath_prompt_version_{name}_total{{" in metrics
    told = cut_over(served, "cutover", "clerk@2", "--back")
    assert "1 is promoted" in told and "of conversations" not in told and "TTFT p50" in told
    assert turns(served, moved[0]) == {"clerk@1"}
    assert "2 is promoted" in cut_over(served, "cutover", "clerk@2", "--to", "100")
    assert {answered(served, "globex", "clerk", path) for path in APIS} == {("clerk@2", True)}
    assert "1 is promoted" in cut_over(served, "rollback", "clerk")
    refused = served.post("/v1/prompts/cutover", "operator", prompt_ref="clerk@1", percent=20)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_ref")


def test_a_private_prompt_is_its_tenants_and_a_changed_file_changes_nothing(served: Served) -> None:
    """Another tenant gets the answer for an unknown prompt; running requests keep the locked text."""
    cut_over(served, "promote", "pilot@1")
    refused = [
        served.post(CHAT, "globex", model="demo", messages=said(("user", "Hi")), prompt_ref=ref)
        for ref in ("pilot@1", "nobod@1")
    ]
    assert [answer.status_code for answer in refused] == [404, 404]
    assert refused[0].text.replace("pilot", "nobod") == refused[1].text
    (file,) = (served.root / "prompts").rglob("pilot/1.*")
    file.write_text("You are somebody else. ")
    broken = served.post("/v1/prompts/warm", "operator", prompt_ref="clerk@1")
    assert (broken.status_code, broken.json()["error"]["message"].count("sha256:")) == (400, 2)
    assert answered(served, "acme", "pilot") == ("pilot@1", True)
