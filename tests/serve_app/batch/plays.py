"""Batches over several processes that die, pause and follow each other, with moved clocks, beside a naive oracle."""

import sqlite3
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from serve_app.batch import batch_run, files, lines, worker
from serve_app.batch.batch_run import Said
from serve_app.batch.batches import ABANDONED_S, BATCH, ENDED, QUEUE, StoredBatch
from serve_app.batch.files import CONTENT, FILE
from tests.harness.virtual_time import passes
from tests.serve_app.batch.world import Ingress, World, said

TENANTS = ("acme", "globex", "initech")
CHUNK = 64
STATUSES = (200, 200, 200, 400, 500)
"""Of lines, by their numbers; the server fails at one of five, each time."""
SECONDS = st.sampled_from([0.1, 0.5, 1.0, 2.0, 7.0, 25.0, 70.0])


@dataclass
class Sent:
    """A batch as its tenant sent it."""

    tenant: str
    prompts: list[str]
    batch: StoredBatch
    cancelled: bool = False


@dataclass
class Play:
    """What happens to the batches of some tenants, and what may be expected of them."""

    world: World
    here: list[Ingress] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    limited: dict[str, float] = field(default_factory=dict)
    """By tenant, until when its own limits refuse it."""
    busy_until_s: float = 0.0
    answered: Counter[str] = field(default_factory=Counter)
    again: list[str] = field(default_factory=list)
    """Lines that were asked for though they had a result."""
    refused = False
    jumped = False
    most_shift_s = 0.0
    broken = False
    """Whether a process died, or was stopped, with lines in progress."""

    def __post_init__(self) -> None:
        self.world.answer = self.answer  # type: ignore[method-assign]
        self.here = [self.world.ingress(name) for name in ("one", "two")]
        for one in self.here:
            one.start()

    async def answer(self, tenant: str, prompt: str) -> Said:
        batch, number = map(int, prompt.split())
        assert self.sent[batch].tenant == tenant, "a line of another tenant"
        if self.world.kept[self.sent[batch].batch.id, f"c{number}"]:
            self.again.append(prompt)
        now_s = self.world.loop.time()
        if self.busy_until_s > now_s:
            self.refused = True
            return said(prompt, 503, retry_after_s=2.0)
        if (left_s := self.limited.get(tenant, 0.0) - now_s) > 0:
            self.refused = True
            return said(prompt, 429, retry_after_s=max(1.0, left_s), own_limit=True)  # as the server tells
        await passes(0.25 * (1 + number % 5))
        self.answered[prompt] += 1
        return said(prompt, STATUSES[number % 5])

    async def send(self, tenant: str, count: int, kind: str, at: int) -> None:
        prompts = [f"{len(self.sent)} {number}" for number in range(count)]
        one = self.here[at]
        batch = StoredBatch(id="", endpoint="", content="", size=0, created_at=0, expires_at=0)
        self.sent.append(sent := Sent(tenant, prompts, batch))
        if kind == "messages":
            sent.batch = await one.messages(tenant, prompts)
        else:
            sent.batch = await one.submit(tenant, prompts, window_s=20_000.0 if kind == "batch" else 40.0)

    async def cancel(self, number: int) -> None:
        if self.sent:
            sent = self.sent[number % len(self.sent)]
            found = await self.here[0].batches.cancel(sent.tenant, sent.batch.id)
            sent.cancelled |= found.status == "cancelling"

    async def replace(self, at: int, *, kill: bool) -> None:
        self.broken = True
        await (self.here[at].kill() if kill else self.here[at].worker.stop())
        self.here[at] = self.world.ingress(("one", "two")[at])
        self.here[at].start()

    async def move_clock(self, seconds: float) -> None:
        self.jumped = True
        self.world.shift_s += seconds
        self.most_shift_s = max(self.most_shift_s, self.world.shift_s)

    async def limit(self, tenant: str, seconds: float) -> None:
        self.limited[tenant] = self.world.loop.time() + seconds

    async def busy(self, seconds: float) -> None:
        self.busy_until_s = self.world.loop.time() + seconds

    async def be_quiet(self, quiet: bool) -> None:
        self.world.quiet = quiet

    async def counts_are_true(self) -> None:
        """No row counts a result that is not stored; a batch that nobody runs counts each of them."""
        for sent in self.sent:
            found = await self.here[0].batches.get(sent.tenant, sent.batch.id)
            if found.ended or found.status == "validating":
                continue
            stored, counted = len(await self.here[0].batches.done(sent.tenant, found)), found.completed + found.failed
            assert counted <= stored <= len(sent.prompts)
            if not found.holder and not (self.broken or self.jumped):
                assert counted == stored

    async def end(self) -> None:
        """Let everything end, and what is abandoned be found."""
        self.limited.clear()
        self.busy_until_s, self.world.quiet = 0.0, True
        for one in self.here:
            one.worker.limits_changed()
        await self.world.until_ended(self.here[0], *((sent.tenant, sent.batch) for sent in self.sent), most_s=3000)
        await self.world.until(lambda: self.tidied(), 100)
        for one in self.here:
            await one.worker.stop()

    async def tidied(self) -> bool:
        return not await self.here[0].objects.ids("", QUEUE)

    async def judge(self) -> None:
        """Compare the results, the counts and the rooms with what was sent."""
        one = self.world.ingress("judge")
        self.world.shift_s = self.most_shift_s + ABANDONED_S + 1  # some were begun before the clock was set back
        wanted = Counter[str]()
        for tenant in TENANTS:
            await one.batches.sweep(tenant)
        for sent in self.sent:
            batch = await one.batches.get(sent.tenant, sent.batch.id)
            await self.judge_one(one, sent, batch)
        for tenant in TENANTS:
            kept = await one.files.listed(tenant, list)
            own = await one.batches.listed(tenant, list)
            assert len(own) == sum(sent.tenant == tenant for sent in self.sent)
            sizes = [file.bytes for file in kept] + [batch.results_size for batch in own if batch.results]
            wanted += Counter({FILE: len(kept), BATCH: len(own), CONTENT: len(sizes)})
            wanted["chunks"] += sum(-(-size // CHUNK) for size in sizes)
        with sqlite3.connect(self.world.file) as database:
            (rows,) = database.execute("SELECT COUNT(*) FROM sealed_objects").fetchone()
        assert rows == wanted.total(), "something stays that nothing names, or something is gone"
        if not self.jumped:
            assert not self.again, "asked for though they have a result"
        if not (self.jumped or self.broken):
            for prompt, times in self.answered.items():
                fails = STATUSES[int(prompt.split()[1]) % 5] == 500
                most = (batch_run.MAX_FAULTS if not self.refused else times) if fails else 1  # refusals may end a turn
                assert times <= most, prompt

    async def judge_one(self, one: Ingress, sent: Sent, batch: StoredBatch) -> None:
        assert batch.status in ENDED[1:]
        assert (batch.status == "cancelled") <= sent.cancelled
        told = [(kind, line) for kind, found in (await self.told(one, sent, batch)).items() for line in found]
        assert sorted(line["custom_id"] for _, line in told) == sorted(f"c{at}" for at in range(len(sent.prompts)))
        counts = Counter[int]()
        for kind, line in told:
            number = int(line["custom_id"][1:])
            status, prompt = line["status"], sent.prompts[number]
            counts[status] += 1
            if status:
                assert (status, line["prompt"]) == (STATUSES[number % 5], prompt)
                assert kind == ("output" if status == 200 else "error")
            else:
                assert batch.status != "completed" and kind == "error"
                assert line["why"] == batch.status
        assert (batch.total, batch.completed) == (len(sent.prompts), counts[200])
        assert batch.failed == counts[400] + counts[500]
        assert (batch.usage or {"input_tokens": 0})["input_tokens"] == 3 * counts[200]
        if batch.status == "completed":
            assert not counts[0]

    async def told(self, one: Ingress, sent: Sent, batch: StoredBatch) -> dict[str, list[dict[str, Any]]]:
        """Return the lines of each file in one form, in the order of the file."""
        found: dict[str, list[dict[str, Any]]] = {"output": [], "error": []}
        if batch.anthropic:
            for line in await one.message_results(sent.tenant, batch):
                body = line["result"].get("message") or line["result"].get("error") or {}
                number = int(line["custom_id"][1:])
                status = 0 if not body else 200 if line["result"]["type"] == "succeeded" else STATUSES[number % 5]
                why = {"canceled": "cancelled"}.get(line["result"]["type"], line["result"]["type"])
                found["output" if status == 200 else "error"].append(
                    {"custom_id": line["custom_id"], "status": status, "why": why, "prompt": body.get("prompt")}
                )
            return found
        for kind, result in (await one.results(sent.tenant, batch)).items():
            for line in result:
                response, error = line["response"], line["error"]
                found[kind].append(
                    {"custom_id": line["custom_id"], "status": 0, "why": error["code"].removeprefix("batch_")}
                    if response is None
                    else {
                        "custom_id": line["custom_id"],
                        "status": response["status_code"],
                        "prompt": response["body"]["prompt"],
                    }
                )
            numbers = [int(line["custom_id"][1:]) for line in result]
            assert numbers == sorted(numbers), "in the order of the input"
        return found


TENANT, AT = st.sampled_from(TENANTS), st.integers(0, 1)
KIND = st.sampled_from(["batch", "batch", "messages", "short"])
SEND = st.tuples(st.just("send"), TENANT, st.integers(1, 14), KIND, AT)
STEADY = st.one_of(
    SEND, SEND, st.tuples(st.just("limit"), TENANT, SECONDS), st.tuples(st.just("busy"), SECONDS),
    st.tuples(st.just("be_quiet"), st.booleans()), st.tuples(st.just("cancel"), st.integers(0, 9)),
)  # fmt: skip
REPLACED = st.builds(lambda at, kill: ("replace", at, kill), AT, st.booleans())
MOVED = st.tuples(st.just("move_clock"), st.sampled_from([-7000.0, -60.0, -15.0, 15.0, 25.0, 100.0, 400.0]))


def played(events: list[tuple[tuple[Any, ...], float]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "MAX_RUNNING", 2)
        patch.setattr(files, "CHUNK_BYTES", CHUNK)
        patch.setattr(lines, "PART_LINES", 3)
        world = World(Path(folder) / "responses.sqlite", max_bytes=1 << 20)

        async def run() -> None:
            play = Play(world)
            for (name, *values), seconds in events:
                if name == "replace":
                    await play.replace(values[0], kill=values[1])
                else:
                    await getattr(play, name)(*values)
                await passes(seconds)
                await play.counts_are_true()
            await play.end()
            await play.judge()

        try:
            world.run(run())
        finally:
            world.close()


def of(*kinds: st.SearchStrategy[Any]) -> Any:
    return given(st.lists(st.tuples(st.one_of(*kinds), SECONDS), min_size=3, max_size=9))


few = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # plays are short, and take too long to be made shorter
)
