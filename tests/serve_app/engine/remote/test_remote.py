"""A replica before a server that already runs: real processes that speak the public forms of vLLM and SGLang."""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
from msgspec import structs

from router.protocol.block_hash import PrefixScope, hash_blocks, split_chain
from serve_app.config.workers import listed, worker_of
from serve_app.engine.protocol import AdapterSpec, EngineOutput, RequestTooLong, UnknownAdapter
from serve_app.engine.remote import engine as remote
from serve_app.engine.remote import seat as seat_module
from serve_app.engine.remote.engine import RemoteEngine
from serve_app.engine.remote.settings import RemoteSettings
from serve_app.engine.sampling_params import TokenRules
from tests.harness.eventually import eventually
from tests.harness.worker_double import Here, doubles, following, processes
from tests.router.vllm_events.pool_model import Routers
from tests.serve_app.engine.tiny import Collector, request, root_of

SIZE, VOCAB = 16, 300
PROMPT = np.arange(100, dtype=np.int32) + 20


class Outputs(Collector):
    """Also the kinds of errors."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, str] = {}

    def __call__(self, outputs: Sequence[EngineOutput]) -> None:
        self.kinds |= {output.request_id: output.error for output in outputs}
        super().__call__(outputs)


class Seat(RemoteEngine):
    """An engine, what its routers hear, and shorthands."""

    def __init__(self, *entries: str, outside: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self.routers = Routers()
        chosen = {"model": "demo", "model_name": "demo", "vocab_size": VOCAB, "max_model_len": 4096, **settings}
        super().__init__(RemoteSettings(entries, **chosen), self.routers, **(outside or {}))

    def fit(self) -> None:
        eventually(lambda: not self.load().out)

    def told(self, name: str) -> str:
        return str(self.load().attributes.get(name, ""))

    def ask(self, name: str, ids: Any = PROMPT, most: int = 8, **more: Any) -> Outputs:
        out = Outputs()
        self.submit(request(name, ids, most, **more), out)
        out.wait([name])
        return out


@contextmanager
def seated(*entries: str, **settings: Any) -> Iterator[Seat]:
    seat = Seat(*entries, **settings)
    seat.start()
    try:
        yield seat
    finally:
        seat.stop()


def answer_to(ids: Sequence[int], most: int) -> list[int]:
    tokens = list(ids)
    for _ in range(most):
        tokens.append(following(tokens, VOCAB))
    return tokens[len(ids) :]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_tokens_cached_tokens_and_blocks_are_the_servers(kind: str) -> None:
    """Its events are followed by its own salts, and no salt's blocks are another's."""
    with doubles(1, kind=kind) as (server,), seated(server.entry) as seat:
        seat.fit()
        assert seat.told("routed") == "by its KV events"
        assert seat.told("worker") == server.url
        first = seat.ask("a")
        assert first.tokens["a"] == answer_to(PROMPT.tolist(), 8)
        assert (first.cached["a"], first.finish["a"]) == (0, "length")
        chain = hash_blocks(root_of(PrefixScope("tiny")), PROMPT, SIZE)
        eventually(lambda: set(split_chain(chain)) <= seat.routers.held())
        assert seat.cached_blocks(chain, 9) == 6
        assert seat.ask("b").cached["b"] == 96
        other = PrefixScope("tiny", salt=b"other")
        assert seat.cached_blocks(hash_blocks(root_of(other), PROMPT, SIZE), 9) == 0
        assert seat.ask("c", scope=other).cached["c"] == 0
        seat.tell_cache(anew=True)
        assert set(split_chain(chain)) <= seat.routers.held()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_a_request_asks_for_reaches_the_server(kind: str) -> None:
    with doubles(1, kind=kind) as (server,), seated(server.entry) as seat:
        seat.fit()
        whole = answer_to(PROMPT.tolist(), 8)
        stopped = seat.ask("stop", stop_token_ids=(whole[3],))
        assert (stopped.tokens["stop"], stopped.finish["stop"]) == (whole[: whole.index(whole[3])], "stop")
        shown = seat.ask("shown", stop_token_ids=(whole[3],), shown_stop_token_ids=(whole[3],))
        assert shown.tokens["shown"] == whole[: whole.index(whole[3]) + 1]
        warm = seat.ask("warm", most=0)
        assert (warm.tokens["warm"], warm.finish["warm"], warm.cached["warm"]) == ([], "length", 96)
        with pytest.raises(RequestTooLong):
            seat.ask("long", most=4096)


def test_log_probabilities_have_token_ids_and_forbidden_words_are_refused_where_none_can_be_told() -> None:
    with doubles(1) as (server,), seated(server.entry) as seat:
        seat.fit()
        told = seat.ask("a", logprobs=1).logprobs["a"]
        assert [each.logprob for each in told] == [-0.5] * 8
        assert [each.top for each in told] == [((token, -0.5),) for token in answer_to(PROMPT.tolist(), 8)]
        refused = seat.ask("b", rules=TokenRules(bad_words=((1, 2),)))
        assert (refused.finish["b"], refused.kinds["b"]) == ("error", "invalid")
        assert "tokenizer.json" in refused.errors["b"]


def test_cached_tokens_that_only_the_end_tells_correct_those_said_before() -> None:
    """A server that is followed by load alone has them in its usage, at the answer's end."""
    with doubles(1, kind="tensorrt_llm") as (server,), seated(server.entry) as seat:
        seat.fit()
        assert seat.told("routed") == "by load alone: TensorRT-LLM publishes no KV events in this form"
        assert [seat.ask(name).cached[name] for name in "ab"] == [0, 96]


@pytest.mark.parametrize(
    ("options", "settings", "sentence"),
    [
        ({"owner": "ollama"}, {}, "is no vLLM, SGLang or TensorRT-LLM server: its model is owned by 'ollama'"),
        ({"model": "other"}, {}, "serves other, not demo: set model, or served_model_name"),
        ({"key": "theirs"}, {"key": "mine"}, "refuses this API key: set WARMPATH_WORKER_KEY, or worker_key_file"),
        ({"unsalted": 1}, {"apart": True}, "ignores cache_salt, so tenants would share its cache: update it"),
        ({"other_tokenizer": 1}, {"tokenizer": "demo"}, "has another tokenizer than demo"),
    ],
)
def test_an_unfit_server_gets_no_request_and_one_sentence(
    options: dict[str, Any], settings: dict[str, Any], sentence: str, demo_model_path: Path
) -> None:
    tokenizer = str(demo_model_path / "tokenizer.json")
    chosen = settings | ({"tokenizer": tokenizer} if "tokenizer" in settings else {})
    with doubles(1, tokenizer=tokenizer, **options) as (server,), seated(server.entry, **chosen) as seat:
        eventually(lambda: seat.load().out == f"{server.url} {sentence}")
        refused = seat.ask("a")
        assert (refused.kinds["a"], refused.errors["a"]) == ("unavailable", remote.AWAY), "no address is told"
        server.kill()
        server.start(owner="", model="demo", key="", unsalted=0, other_tokenizer=0)
        seat.fit()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"events": 0}, "by load alone: no KV events can be heard from it"),
        ({"block_size": 24}, "by load alone: its blocks have 24 tokens and the routers' 16: set block_size"),
        ({"silent": 1}, "by load alone: it publishes no KV events"),
        ({"old": 1}, "by load alone: its KV events tell no salts: update it"),
    ],
)
def test_a_server_without_usable_events_serves_by_load_and_says_so(options: dict[str, Any], sentence: str) -> None:
    with doubles(1, **options) as (server,), seated(server.entry) as seat:
        seat.fit()
        assert seat.told("routed").startswith(sentence)
        assert seat.ask("a").tokens["a"] == answer_to(PROMPT.tolist(), 8)
        assert seat.ask("b").cached["b"] > 0
        assert not seat.routers.held()


def test_a_server_that_tells_no_cached_tokens_is_believed_and_says_so() -> None:
    with doubles(1, untold=1) as (server,), seated(server.entry) as seat:
        seat.fit()
        assert seat.told("cached_tokens").startswith("as predicted: its answers tell no cached tokens")
        seat.ask("a")
        eventually(lambda: seat.cached_blocks(hash_blocks(root_of(PrefixScope("tiny")), PROMPT, SIZE), 9) == 6)
        assert seat.ask("b").cached["b"] == 96


def test_a_server_that_lies_in_its_events_goes_by_load() -> None:
    with doubles(1, lies=1) as (server,), seated(server.entry) as seat:
        seat.fit()
        for number in range(8):
            if seat.told("routed") != "by its KV events":
                break
            assert seat.ask(f"lie {number}").cached[f"lie {number}"] == 0
        lies = "by load alone: of its last 4 predictions 4 were wrong: fewer tokens were cached"
        assert seat.told("routed") == lies
        assert not seat.routers.held()
        seat.ask("more")
        assert not seat.routers.held(), "a liar's events are not passed on"
        server.kill()
        server.start(lies=0)
        eventually(lambda: seat.told("routed") == "by its KV events")


def test_an_answer_goes_on_elsewhere_after_its_server_died_and_the_server_returns_empty() -> None:
    with doubles(1, token_s=0.02) as (server,), seated(server.entry) as seat:
        seat.fit()
        out = Outputs()
        seat.submit(request("a", PROMPT, 200), out)
        out.wait_tokens("a", 5)
        eventually(lambda: bool(seat.routers.held()))
        server.kill()
        out.wait(["a"])
        assert (out.finish["a"], out.kinds["a"]) == ("error", "unavailable")
        eventually(lambda: "does not answer" in seat.load().out)
        assert not seat.routers.held()
        assert seat.healthy(), "another replica could do no better"
        server.start()
        seat.fit()
        had = out.tokens["a"]
        asked = structs.replace(request("b", [*PROMPT, *had], 200 - len(had)), resumed_tokens=len(had))
        rest = Outputs()
        seat.submit(asked, rest)
        rest.wait(["b"])
        assert [*had, *rest.tokens["b"]] == answer_to(PROMPT.tolist(), 200)
        assert rest.cached["b"] == 0


def test_a_constrained_answer_is_computed_again_and_goes_on_where_it_was() -> None:
    grammar = '{"grammars":[{"json_schema":{"type":"object"}}]}'
    with doubles(1) as (server,), seated(server.entry) as seat:
        seat.fit()
        whole = answer_to(PROMPT.tolist(), 20)
        for name, had, kind in (("right", whole[:7], ""), ("wrong", [9, 9], "invalid")):
            out = Outputs()
            asked = request(name, [*PROMPT, *had], 20 - len(had))
            seat.submit(structs.replace(asked, resumed_tokens=len(had), grammar=grammar), out)
            out.wait([name])
            assert out.kinds[name] == kind
            assert kind or out.tokens[name] == whole[7:]


def test_a_frozen_server_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat_module, "HEALTH_TIMEOUT", aiohttp.ClientTimeout(total=0.1))
    monkeypatch.setattr(seat_module, "LOOK_S", 0.05)
    with processes(1, token_s=0.02) as (server,), seated(server.entry) as seat:
        seat.fit()
        out = Outputs()
        seat.submit(request("a", PROMPT, 1000), out)
        out.wait_tokens("a", 2)
        server.pause(stop=True)
        out.wait(["a"])
        assert out.kinds["a"] == "unavailable"
        server.pause(stop=False)
        seat.fit()


def test_blocks_are_known_again_after_the_feed_was_cut() -> None:
    """The server lives on with its cache: it sends the batches again that were missed and those from before."""
    with doubles(1) as (server,), cut_off(server) as (entry, cut), seated(entry) as seat:
        seat.fit()
        seat.ask("a")
        chain = hash_blocks(root_of(PrefixScope("tiny")), PROMPT, SIZE)
        eventually(lambda: seat.cached_blocks(chain, 9) == 6)
        cut()
        eventually(lambda: seat.told("routed") == "by load alone: its feed of KV events is cut")
        assert not seat.routers.held()
        more = seat.ask("b", PROMPT + 100).tokens["b"]
        assert more == answer_to((PROMPT + 100).tolist(), 8)
        cut(heal=True)
        eventually(lambda: seat.cached_blocks(chain, 9) == 6)
        assert seat.ask("c", PROMPT + 100).cached["c"] == 96
        assert seat.told("routed") == "by its KV events"


@contextmanager
def cut_off(server: Here) -> Iterator[tuple[str, Callable[..., None]]]:
    """Yield an entry whose events pass through relays, and what cuts them or lets them pass again."""
    open_sockets: list[socket.socket] = []
    state = {"open": True}
    listeners = {port: socket.create_server(("127.0.0.1", 0)) for port in (server.events, server.replay)}

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept(port: int, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
                if not state["open"]:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", port))
            except OSError:
                return
            open_sockets.extend((near, far))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    def cut(*, heal: bool = False) -> None:
        state["open"] = heal
        while not heal and open_sockets:
            end = open_sockets.pop()
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    for relayed in listeners.items():
        threading.Thread(target=accept, args=relayed, daemon=True).start()
    events, replay = (listener.getsockname()[1] for listener in listeners.values())
    try:
        yield f"{server.url}?events={events}&replay={replay}", cut
    finally:
        for listener in listeners.values():
            listener.close()


def test_each_replica_has_a_worker_of_its_own_and_takes_another_when_the_list_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat_module, "LOOK_S", 0.05)
    claims: dict[str, int] = {}

    def claim(me: int) -> Callable[[Sequence[str], str], str]:
        def take(urls: Sequence[str], mine: str) -> str:
            if mine in urls:
                return mine
            if claims.get(mine) == me:
                del claims[mine]
            return next((url for url in urls if claims.setdefault(url, me) == me), "")

        return take

    file = tmp_path / "workers"
    with doubles(3) as servers:
        file.write_text("# two\n" + "\n".join(server.entry for server in servers[:2]))
        seats = [Seat(f"file:{file}"), Seat(f"file:{file}")]
        try:
            for number, seat in enumerate(seats):
                seat.share(claim(number))
                seat.start()
            for seat in seats:
                seat.fit()
            assert {seat.told("worker") for seat in seats} == {server.url for server in servers[:2]}
            assert seats[0].seats == 2
            stays = next(seat for seat in seats if seat.told("worker") == servers[1].url)
            moves = next(seat for seat in seats if seat is not stays)
            stays.ask("a")
            file.write_text(servers[1].entry)
            eventually(lambda: moves.load().out == "no worker is free for this replica")
            file.write_text(f"{servers[1].entry}\n{servers[2].entry}\n")
            eventually(lambda: moves.told("worker") == servers[2].url and not moves.load().out)
            file.unlink()
            assert moves.ask("b").tokens["b"] == answer_to(PROMPT.tolist(), 8), "a list that is away changes nothing"
            assert stays.ask("c").cached["c"] == 96, "it kept its worker, and what it knew of it"
        finally:
            for seat in seats:
                seat.stop()


def test_workers_are_listed_by_url_file_and_name(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("http://c:1 # the third\n\nhttp://a:8000\n")
    urls = [each.url for each in listed(["http://a:8000/v1", "https://b", f"file:{tmp_path / 'more'}"])]
    assert urls == ["http://a:8000", "https://b:443", "http://c:1"]
    (local,) = listed(["dns+http://127.0.0.1:8000?events=1&replay=0"])
    assert (local.url, local.events, local.replay) == ("http://127.0.0.1:8000", "tcp://127.0.0.1:1", "")
    assert worker_of("http://[::1]:8").events == "tcp://[::1]:5557"
    assert {each.url for each in listed(["dns+http://localhost:7"])} <= {"http://127.0.0.1:7", "http://[::1]:7"}
    for wrong in ("a:8000", "ftp://a", "http://", "http://a?port=1", "http://a?events=x", "http://a/b", "http://u:p@a"):
        with pytest.raises(ValueError, match="is no worker"):
            worker_of(wrong)


def test_an_adapter_is_asked_for_by_its_name_and_has_blocks_of_its_own() -> None:
    scope = PrefixScope("tiny", "poet@1")
    with doubles(1) as (server,), seated(server.entry) as seat:
        seat.fit()
        with pytest.raises(UnknownAdapter):
            seat.ask("no", scope=scope)
        seat.adapters.load(AdapterSpec("poet", "1", "/weights"))
        seat.ask("base")
        assert [seat.ask(name, scope=scope).cached[name] for name in "ab"] == [0, 96]


def test_an_adapter_that_is_replaced_is_loaded_anew_at_the_server() -> None:
    """Under its old name, whose weights its requests would get otherwise. One that the server lost is loaded again."""

    def loaded(server: Here) -> list[str]:
        return [card["root"] for card in httpx.get(f"{server.url}/v1/models").json()["data"] if card.get("parent")]

    with doubles(1) as (server,), seated(server.entry) as seat:
        for version, path in (("1", "/first"), ("2", "/second"), ("2", "/second")):
            seat.fit()
            seat.adapters.load(AdapterSpec("poet", version, path))
            asked = request("a", PROMPT, 4, scope=PrefixScope("tiny", f"poet@{version}"))
            out = Outputs()
            seat.submit(structs.replace(asked, lora_path=path), out)
            out.wait(["a"])
            assert out.finish["a"] == "length", out.errors
            assert loaded(server) == [path]
            if version == "2":
                server.kill()
                eventually(lambda: bool(seat.load().out))
                server.start()


def test_a_trial_that_fails_in_an_unforeseen_way_leaves_nobody_who_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each new trial would add a thread that tells routers of the same server's blocks."""
    left = 3

    async def failing(*_: object) -> None:
        nonlocal left
        left -= 1
        if left:
            raise RuntimeError

    monkeypatch.setattr(seat_module, "LOOK_S", 0.05)
    with doubles(1) as (server,):
        seat = Seat(server.entry)
        monkeypatch.setattr(seat.seat, "_trial", failing)
        seat.start()
        try:
            eventually(lambda: "RuntimeError" in seat.load().out)
            seat.fit()
            eventually(lambda: sum(each.name == "vllm-events" for each in threading.enumerate()) == 1)
        finally:
            seat.stop()
