"""Recording at the ingress: every request once, live to switch, one key for all ingresses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from ray.exceptions import RayError

from router.protocol.events import StatsReport
from router.protocol.request import Decision, ShadowDecision
from serve_app.config.app import AppConfig
from serve_app.config.live import BadSettings, app_config, overlaid
from serve_app.engine.protocol import FirstToken
from serve_app.errors import Overloaded
from serve_app.ingress import traffic_log
from serve_app.ingress.observe.traffic import MOST_RUNNING, TrafficObserver
from serve_app.ingress.traffic_log import facts_of
from serve_app.traffic.reader import read_traffic
from serve_app.traffic.recording_key import KEY_BYTES, KeyOffer
from tests.harness.eventually import until
from tests.serve_app.ingress.scripted import GENERATION, ReadCheckpoint
from tests.serve_app.ingress.several import Several

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who are you? " * 20}], "max_tokens": 8}
TENANTS = [{"name": name, "key_sha256": [sha256(name.encode()).hexdigest()]} for name in ("acme", "globex")]


@pytest.fixture(scope="module")
def checkpoint(demo_model_path: Path) -> ReadCheckpoint:
    return ReadCheckpoint(demo_model_path)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted replicas report nothing."""
    monkeypatch.setattr(traffic_log, "FACTS_S", 0.0)
    monkeypatch.setattr(traffic_log, "LOOK_S", 0.02)


def config_of(path: Path | None = None, **more: Any) -> AppConfig:
    log = None if path is None else {"path": str(path), **more.pop("log", {})}
    return app_config({"model": "demo", "engine": "simulated", "traffic_log": log, "max_model_len": 4096, **more})


@asynccontextmanager
async def opened(checkpoint: ReadCheckpoint, config: AppConfig, **outside: Any) -> AsyncIterator[Several]:
    several = await Several.open(checkpoint, config, **outside)
    try:
        yield several
    finally:
        await several.address.traffic_log.close()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def requests_of(path: Path) -> list[dict[str, Any]]:
    return [line for line in lines_of(path) if "input_length" in line]


def test_each_request_is_a_line(checkpoint: ReadCheckpoint, tmp_path: Path) -> None:
    """Of every door and form, with the status that its client saw, of all choices and each prompt; no words at all."""
    path = tmp_path / "traffic.jsonl"

    async def ask() -> None:
        async with opened(checkpoint, config_of(path, tenants=TENANTS)) as several:
            several.scripts["demo"].text = "I am the demo, at your service."
            first = await several.ask("/v1/chat/completions", {**CHAT, "model": "demo"}, "acme")
            longer = [
                *CHAT["messages"],
                {"role": "assistant", "content": "Demo."},
                {"role": "user", "content": "So? " * 30},
            ]
            await several.ask("/v1/chat/completions", {"messages": longer, "model": "demo", "stream": True}, "acme")
            await several.ask("/v1/messages", {**CHAT, "model": "demo", "stream": True}, "globex")
            body = {"model": "demo", "prompt": ["one " * 50, "two " * 60], "n": 2, "max_tokens": 8}
            answer = await several.ask("/v1/completions", body, "acme")
            assert (first.status_code, answer.status_code) == (200, 200)
            assert (await several.ask("/v1/chat/completions", {**CHAT, "model": "demo"})).status_code == 401
            assert (await several.ask("/v1/models", key="acme")).status_code == 200
            usages.extend([first.json()["usage"], answer.json()["usage"]])

    usages: list[dict[str, Any]] = []
    asyncio.run(ask())
    header, *_ = lines_of(path)
    one, two, other, *both = requests_of(path)
    assert header["models"]["demo"]["settings"]["block_size"] == 16
    assert (one["input_length"], one["output_length"]) == (usages[0]["prompt_tokens"], usages[0]["completion_tokens"])
    assert one["cached_tokens"] == 16 and one["ttft_ms"] > 0.0 and one["duration_ms"] >= one["ttft_ms"]
    assert one["end"] == "stop" and "status" not in one
    assert len(one["hash_ids"]) == one["input_length"] // 16
    assert two["parent"] == one["id"] and two["hash_ids"][: len(one["hash_ids"])] == one["hash_ids"]
    assert one["tenant"] == two["tenant"] != other["tenant"]
    assert not {*one["hash_ids"]} & {*other["hash_ids"]}  # another tenant's
    assert [line["choices"] for line in both] == [2, 2] and both[0]["id"] != both[1]["id"]
    assert sum(line["input_length"] for line in both) == usages[1]["prompt_tokens"]
    assert sum(line["output_length"] for line in both) == usages[1]["completion_tokens"]
    written = path.read_text().lower()
    assert not [word for word in ("who", "acme", "globex", "service", "one ") if word in written]
    assert (path.stat().st_mode & 0o777) == 0o600
    assert read_traffic([path]).prompt_tokens.tolist() == [
        line["input_length"] for line in sorted((one, two, other, *both), key=lambda line: line["timestamp"])
    ]


def test_refusals_errors_and_clients_that_leave(checkpoint: ReadCheckpoint, tmp_path: Path) -> None:
    """With the limit, the error's code, or `cancelled`; what is wrong with a body is no traffic."""
    path = tmp_path / "t.jsonl"
    tenants = [{**TENANTS[0], "concurrent_requests": 1}]

    async def ask() -> None:
        async with opened(checkpoint, config_of(path, tenants=tenants)) as several:
            script = several.scripts["demo"]
            script.text, script.ends = "Slow.", asyncio.Semaphore(0)
            running = asyncio.create_task(several.ask("/v1/chat/completions", {**CHAT, "model": "demo"}, "acme"))
            await until(lambda: bool(script.asked))
            refused = await several.ask("/v1/chat/completions", {**CHAT, "model": "demo"}, "acme")
            assert refused.status_code == 429
            script.ends.release()
            assert (await running).status_code == 200
            script.ends, script.fails = None, Overloaded("No replica.", code="replicas_lost", retry_after_s=1.0)
            script.text = ""
            lost = await several.ask("/v1/chat/completions", {**CHAT, "model": "demo"}, "acme")
            assert lost.status_code == 503
            script.text = "Some words, and then no more of them."
            broken = await several.ask("/v1/chat/completions", {**CHAT, "model": "demo", "stream": True}, "acme")
            assert broken.status_code == 200 and "error" in broken.text
            assert (await several.ask("/v1/chat/completions", {"messages": 1}, "acme")).status_code == 400
            script.fails, script.ends = None, asyncio.Semaphore(0)
            asked = len(script.asked)
            with pytest.raises(TimeoutError):
                await leave(several, lambda: len(script.asked) > asked)
            await until(lambda: script.cancelled > 0)

    asyncio.run(ask())
    refused, good, lost, broken, left = requests_of(path)
    assert (refused["status"], refused["end"], refused["input_length"]) == (429, "concurrent_requests", 0)
    assert refused["model"] == "demo" and refused["tenant"] == good["tenant"] and "hash_ids" not in refused
    assert (lost["status"], lost["end"], lost["input_length"]) == (503, "replicas_lost", good["input_length"])
    assert "status" not in broken and broken["end"] == "replicas_lost" and broken["output_length"] > 0
    assert (left["status"], left["end"]) == (499, "cancelled")


async def leave(several: Several, begun: Callable[[], bool]) -> None:
    """Ask, and leave once the request has begun."""
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if body:
            return {"type": "http.request", "body": body.pop()}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    body = [msgspec.json.encode({**CHAT, "model": "demo", "stream": True})]
    headers = [(b"host", b"test"), (b"authorization", b"Bearer acme"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("test", 80), "scheme": "http", "http_version": "1.1",
    }  # fmt: skip
    answering = asyncio.ensure_future(several.application(scope, receive, send))
    await until(begun)
    gone.set()
    await answering
    raise TimeoutError


def test_settings_are_live(checkpoint: ReadCheckpoint, tmp_path: Path) -> None:
    """On, without a tenant, to another path, off, on again: without a restart; each recording has a key of its own."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    args = config_of(tenants=TENANTS)

    async def ask() -> None:
        async with opened(checkpoint, args) as several:

            async def use(**log: Any) -> None:
                await several.address.configure(overlaid(args, {"traffic_log": log or None}))

            async def chat(tenant: str) -> None:
                answer = await several.ask("/v1/chat/completions", {**CHAT, "model": "demo"}, tenant)
                assert answer.status_code == 200

            await chat("acme")
            await use(path=str(first))
            await chat("acme")
            await use(path=str(first), leave_out=["acme"])
            await chat("acme")
            await chat("globex")
            await use(path=str(second))
            await chat("acme")
            await use()
            await chat("acme")
            await use(path=str(first))
            await chat("acme")
            with pytest.raises(BadSettings, match="/ is a folder"):
                await use(path="/")
            with pytest.raises(BadSettings, match="block_tokens is 24, and must be a multiple of block_size, 16"):
                await use(path=str(first), block_tokens=24)

    asyncio.run(ask())
    old, between, new = tmp_path / "first.jsonl.1", second, first
    assert [len(requests_of(path)) for path in (old, between, new)] == [2, 1, 1]
    assert len({lines_of(path)[0]["recording"] for path in (old, between, new)}) == 3
    ids = [number for path in (old, between, new) for one in requests_of(path) for number in one["hash_ids"]]
    assert len(ids) == len({*ids}), "two files of one traffic share no id"
    names = [{one["tenant"] for one in requests_of(path)} for path in (old, between, new)]
    assert len(names[0]) == 2 and not names[0] & names[1] and not names[1] & names[2]


@pytest.mark.parametrize(
    ("path", "why"), [(".", "is a folder: name a file"), ("/", "is a folder"), ("~nobody-here/t", "an unknown user")]
)
def test_a_path_that_names_no_file_is_refused_with_the_settings(path: str, why: str) -> None:
    """Not later, when an ingress starts."""
    with pytest.raises(BadSettings, match=why):
        config_of(Path(path))


def together(*addresses: Several) -> None:
    """Let these ingresses call each other."""

    async def ingresses(method: str, offer: KeyOffer, *, timeout_s: float) -> list[KeyOffer | None]:
        assert method == "exchange_recording_key"
        return [one.address.traffic_log.exchange(offer) for one in addresses]

    for one in addresses:
        one.address.traffic_log._ingresses = ingresses


def test_ingresses_record_with_one_key(checkpoint: ReadCheckpoint, tmp_path: Path) -> None:
    """Each in a file of its own; equal prompts have equal ids, and their files merge into one order."""
    args, log = config_of(ingress_replicas=2), {"traffic_log": {"path": str(tmp_path / "t.jsonl")}}
    paths = [tmp_path / "t.one.jsonl", tmp_path / "t.two.jsonl"]

    async def ask() -> None:
        async with opened(checkpoint, args, name="one") as one, opened(checkpoint, args, name="two") as two:
            together(one, two)
            for several in (one, two, one):
                await several.address.configure(overlaid(args, log))
                await several.ask("/v1/chat/completions", {**CHAT, "model": "demo"})
            await until(lambda: all(path.exists() for path in paths))

    asyncio.run(ask())
    headers = [lines_of(path)[0] for path in paths]
    assert headers[0]["recording"] == headers[1]["recording"]
    assert [header["writer"] for header in headers] == ["one", "two"]
    lines = [one for path in paths for one in requests_of(path)]
    assert len(lines) == 3 and len({tuple(one["hash_ids"]) for one in lines}) == 1
    merged = read_traffic(paths)
    assert len(merged.arrival_s) == 3 and not merged.warnings


def test_an_ingress_that_follows_another_takes_none_of_its_lines(checkpoint: ReadCheckpoint, tmp_path: Path) -> None:
    """In a rolling update the old one still answers: it keeps the file, and the new one writes beside it."""
    config = config_of(tmp_path / "t.jsonl", log={"keep": 0})

    async def ask() -> None:
        async with opened(checkpoint, config, name="old") as old:
            await until(lambda: (tmp_path / "t.jsonl").exists())
            async with opened(checkpoint, config, name="new") as new:
                for several in (old, new, old, new):
                    written = several.address.traffic.counts.written
                    await several.ask("/v1/chat/completions", {**CHAT, "model": "demo"})
                    await until(lambda at=written, one=several: one.address.traffic.counts.written > at)

    asyncio.run(ask())
    for name, path in (("old", tmp_path / "t.jsonl"), ("new", tmp_path / "t.new.jsonl")):
        assert lines_of(path)[0]["writer"] == name and len(requests_of(path)) == 2


def test_an_agreement_that_comes_late_begins_another_file(checkpoint: ReadCheckpoint, tmp_path: Path) -> None:
    """Ingresses that did not reach each other recorded with keys of their own: then all use the first made.

    Its replicas are told in that file again.
    """
    args, log = config_of(ingress_replicas=2), {"traffic_log": {"path": str(tmp_path / "t.jsonl")}}

    async def unreachable(*_: Any, **__: Any) -> list[Any]:
        raise RayError

    async def ask() -> None:
        async with opened(checkpoint, args, name="one") as one, opened(checkpoint, args, name="two") as two:
            for several in (one, two):
                several.address.traffic_log._ingresses = unreachable
                await several.address.configure(overlaid(args, log))
                await several.ask("/v1/chat/completions", {**CHAT, "model": "demo"})
            await until(lambda: all(each.address.traffic.counts.written >= 2 for each in (one, two)))
            together(one, two)
            await until((tmp_path / "t.two.jsonl.1").exists)
            await two.ask("/v1/chat/completions", {**CHAT, "model": "demo"})
            await until(lambda: any("replicas" in line for line in lines_of(tmp_path / "t.two.jsonl")))

    asyncio.run(ask())
    kept, alone, joined = (tmp_path / name for name in ("t.one.jsonl", "t.two.jsonl.1", "t.two.jsonl"))
    recordings = [lines_of(path)[0]["recording"] for path in (kept, alone, joined)]
    assert recordings[0] == recordings[2] != recordings[1]
    assert requests_of(kept)[0]["hash_ids"] == requests_of(joined)[0]["hash_ids"] != requests_of(alone)[0]["hash_ids"]


def test_a_key_that_was_ended_is_not_taken_again(checkpoint: ReadCheckpoint, tmp_path: Path) -> None:
    """An ingress that has not heard yet that recording was off still offers it; neither does one of another path."""
    args, log = config_of(), {"traffic_log": {"path": str(tmp_path / "t")}}

    async def ask() -> None:
        async with opened(checkpoint, args) as several:
            recording = several.address.traffic_log
            assert recording.exchange(KeyOffer.new(str(tmp_path / "t"))) is None
            await several.address.configure(overlaid(args, log))
            old = recording.exchange(KeyOffer.new(str(tmp_path / "t")))
            assert old is not None
            await several.address.configure(args)
            await several.address.configure(overlaid(args, log))
            new = recording.exchange(old)
            assert new is not None and new.key != old.key
            assert recording.exchange(KeyOffer(0.0, bytes(KEY_BYTES), "elsewhere")) is new
            first = KeyOffer(0.0, bytes(KEY_BYTES), str(tmp_path / "t"))
            assert recording.exchange(first) is first

    asyncio.run(ask())


def test_replicas_that_come_and_go_are_told(checkpoint: ReadCheckpoint, tmp_path: Path) -> None:
    """With pseudonyms that stay."""
    path = tmp_path / "t"

    def changes() -> list[list[str]]:
        return [
            line["replicas"]
            for line in (lines_of(path) if path.exists() else [])
            if "replicas" in line and "model" in line
        ]

    async def ask() -> None:
        async with opened(checkpoint, config_of(path), replicas=("a", "b")) as several:
            await until(lambda: len(changes()) == 1)
            several.core("demo").update_replicas(["a", "b", "c"])
            await until(lambda: len(changes()) == 2)
            several.core("demo").update_replicas(["b"])
            await until(lambda: len(changes()) == 3)

    asyncio.run(ask())
    two, three, one = changes()
    assert [len(two), len(three), len(one)] == [2, 3, 1]
    assert {*one} < {*two} < {*three}
    assert not {"a", "b", "c"} & {*three}


def test_the_header_waits_for_the_first_replicas(
    checkpoint: ReadCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, and what they report; meanwhile lines wait, and none is lost."""
    monkeypatch.setattr(traffic_log, "FACTS_S", 1e6)
    path = tmp_path / "t"

    async def ask() -> None:
        config = config_of(path, replicas=2)
        async with opened(checkpoint, config, replicas=("a",)) as several:
            core, blocks = several.core("demo"), ("warmpath_kv_cache_blocks", (("state", "free"),), 500.0)
            await several.ask("/v1/chat/completions", {**CHAT, "model": "demo"})
            pulls = "warmpath_kv_pull_tokens_per_second", (), 700.0
            monkeypatch.setattr(core, "stats", lambda: dict.fromkeys(core.replica_ids, StatsReport((blocks, pulls))))
            for _ in range(3):
                await asyncio.sleep(traffic_log.LOOK_S)
            assert not path.exists()
            core.update_replicas(["a", "b"])
            await until(lambda: path.exists() and bool(requests_of(path)))

    asyncio.run(ask())
    facts = lines_of(path)[0]["models"]["demo"]
    assert (facts["replicas"], facts["pool_tokens"], facts["pull_tokens_per_s"]) == (2, 8000, 700.0)


def test_what_a_router_decided_is_told(checkpoint: ReadCheckpoint, tmp_path: Path) -> None:
    """The replica and its predicted tokens, of the first attempt that answered; how many replicas were asked; and what
    the shadow policy would have done. Requests that never end are forgotten, the oldest first.
    """
    path = tmp_path / "t"
    shadow = ShadowDecision("round_robin", "b", False, 16, 0.25)
    decision = Decision("a", "router", 1, 64, 32, "cache", shadow=shadow)  # type: ignore[arg-type]

    async def ask() -> None:
        async with opened(checkpoint, config_of(path)) as several:
            observer, script = several.address.traffic, several.scripts["demo"]
            script.ends = asyncio.Semaphore(0)
            running = asyncio.create_task(several.ask("/v1/chat/completions", {**CHAT, "model": "demo"}))
            await until(lambda: bool(script.asked))
            asked = script.asked[0]
            for attempt, where in ((1, decision), (2, msgspec.structs.replace(decision, replica_id="b"))):
                sent = msgspec.structs.replace(asked, request_id=f"{asked.request_id}.{attempt}")
                observer._delivered(sent, where, FirstToken(16), 0.1)
            script.ends.release()
            assert (await running).status_code == 200
            assert not observer._sent
            for number in range(MOST_RUNNING + 5):
                warm = msgspec.structs.replace(GENERATION, request_id=f"{number}.0", charged=True)
                observer._delivered(warm, decision, FirstToken(0), 0.1)
            assert len(observer._sent) == MOST_RUNNING and "0" not in observer._sent

    asyncio.run(ask())
    (line,) = requests_of(path)
    assert (line["predicted_tokens"], line["retries"]) == (32, 2) and len(line["replica"]) == 16
    assert line["shadow"] == {
        "policy": "round_robin",
        "same": False,
        "predicted_tokens": 16,
        "estimated_ttft_ms": 250.0,
    }


def test_the_header_has_the_simulated_cost_and_no_place_or_name(checkpoint: ReadCheckpoint, tmp_path: Path) -> None:
    """Its settings are those that a simulation needs."""
    config = config_of(
        tmp_path / "t", tenants=TENANTS, simulated_prefill_tokens_per_s=1234.0, simulated_decode_step_s=0.01,
        max_num_seqs=7, secret_file=str(tmp_path / "secret"),
    )  # fmt: skip

    async def ask() -> None:
        async with opened(checkpoint, config) as several:
            facts = facts_of(several.models["demo"])
            assert (facts.prefill_tokens_per_s, facts.decode_step_s, facts.decode_each_s) == (1234.0, 0.0105, 0.0005)
            assert (facts.engine, facts.replicas, facts.max_num_seqs) == ("simulated", 1, 7)
            assert facts.settings["max_num_seqs"] == 7 and "autoscaling" not in facts.settings
            told = msgspec.json.encode(facts).decode()
            assert not [word for word in ("acme", "secret", str(tmp_path)) if word in told]

    asyncio.run(ask())


def test_counts_are_shown(checkpoint: ReadCheckpoint, tmp_path: Path) -> None:
    """Also before any line, and while nothing is recorded."""

    async def ask() -> httpx.Response:
        async with opened(checkpoint, config_of()) as several:
            return await several.ask("/metrics")

    text = asyncio.run(ask()).text
    assert 'warmpath_traffic_lines_total{ingress="ingress"} 0.0' in text
    assert 'warmpath_traffic_lost_total{ingress="ingress",reason="disk"} 0.0' in text


def test_nothing_is_kept_while_it_is_off() -> None:
    """Neither decisions nor lines."""
    observer = TrafficObserver()
    observer._delivered(GENERATION, Decision("a", "r", 1, 0, 0, "cache"), FirstToken(0), 0.1)  # type: ignore[arg-type]
    assert not observer._sent
