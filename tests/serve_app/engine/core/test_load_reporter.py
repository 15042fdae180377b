"""Committed tokens: the engine reports as many as a new request of one token really finds ahead of it."""

from collections import Counter

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.engine.core.load_reporter import LoadReporter
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.scheduling.sequence import SequenceState
from tests.serve_app.engine.scheduling.bench import RATE, Bench
from tests.serve_app.engine.tiny import prompt

queued = st.lists(
    st.tuples(st.integers(1, 400), st.floats(0.0, 0.3), st.sampled_from("ab"), st.booleans()), min_size=1, max_size=12
)


class Line(Bench):
    """``paced``: a sequence decodes, and steps have space for more turns than a tenant may then take."""

    def __init__(self, tenants: str, *, paced: bool = False) -> None:
        super().__init__(*tenants, num_blocks=2048, max_num_seqs=64, max_num_batched_tokens=1024 if paced else 128)
        self.tenants = tenants
        self.scheduler.schedule(RATE)  # it ages sequences by the pace
        self.decode_step_s = 0.01 if paced else 0.0
        if paced:
            self.add("decoding", prompt(16, 99), 1000, tenant=tenants[-1], arrival_s=0.0)
            self.schedule()
        self.view = LoadReporter(self.settings, EngineMeters(), self.scheduler)

    def queue(self, name: str, ids: np.ndarray, arrival_s: float, tenant: str) -> SequenceState:
        tenant = tenant if tenant in self.tenants else self.tenants[0]
        return self.add(name, ids, 1, tenant=tenant, arrival_s=arrival_s)

    def tokens_before(self, newcomer: SequenceState) -> int:
        """Return the tokens queued now that are computed, or found cached, before the newcomer's."""
        line = [*self.scheduler.running, *self.scheduler.waiting]
        left = {sequence: sequence.uncached_tokens(16) for sequence in line}
        done: Counter[SequenceState] = Counter()
        for _ in range(200):
            for item in self.schedule(RATE, self.decode_step_s):
                sequence = item.sequence
                if sequence is newcomer:
                    return done.total()
                done[sequence] = done[sequence] + item.tokens if sequence.prefilling else left[sequence]
        raise AssertionError("the newcomer starves")

    def build(self, rows: list[tuple[int, float, str, bool]], steps: int) -> None:
        shared = prompt(400, 1)
        for number, (length, arrival_s, tenant, shares_prefix) in enumerate(rows):
            ids = shared[:length] if shares_prefix else prompt(length, 100 + number)
            self.queue(f"r{number}", ids, arrival_s, tenant)
        for _ in range(steps):
            self.schedule(RATE, self.decode_step_s)
        # Hints are refreshed when a step is chosen; here they are refreshed without counting a step.
        for sequence in self.scheduler.ready():
            sequence.held_blocks_hint = self.cache.index.count_held(
                sequence.chain, self.cache.reusable_blocks(sequence.prefill_tokens)
            )
        self.view.update()


@settings(max_examples=150)
@given(rows=queued, steps=st.integers(0, 4), age_s=st.floats(0.0, 0.2))
def test_with_one_tenant_committed_tokens_are_exactly_those_before_a_newcomer(
    rows: list[tuple[int, float, str, bool]], steps: int, age_s: float
) -> None:
    """With any waiting or partly computed requests, exactly the reported tokens run before a request of one token."""
    line = Line("a")
    line.build([(length, arrival_s, tenant, False) for length, arrival_s, tenant, _ in rows], steps)
    now_s = 0.3 + age_s
    report = line.view.report(now_s)
    newcomer = line.queue("new", prompt(1, 9), now_s, "a")
    assert line.tokens_before(newcomer) == report.committed_prefill_tokens
    assert report.committed_prefill_tokens <= report.queued_prefill_tokens
    assert report.committed_sequences <= report.waiting_sequences


@settings(max_examples=150)
@given(
    rows=queued,
    steps=st.integers(0, 4),
    tenant=st.sampled_from("abc"),
    tenants=st.sampled_from(["a", "abc"]),
    paced=st.booleans(),
)
@example(  # the rest of a turn that the step's end interrupted goes before the newcomer, not a whole turn
    rows=[(1, 0.0, "b", False), (17, 0.0, "a", True), (17, 0.0, "a", True), (111, 0.0, "a", False)],
    steps=1,
    tenant="b",
    tenants="abc",
    paced=False,
)
@example(  # turns decide which sequence computes a prefix shared by two tenants
    rows=[(1, 0.0, "b", False), (31, 0.125, "b", True), (33, 0.0, "a", True), (281, 0.0, "b", False)],
    steps=0,
    tenant="a",
    tenants="abc",
    paced=False,
)
@example(
    rows=[(17, 0.0, "b", True), (17, 0.0, "a", True), (18, 0.0, "a", False)],
    steps=0,
    tenant="b",
    tenants="abc",
    paced=False,
)
@example(  # the tenant with the most recent use has a shorter turn
    rows=[(2, 0.0, "b", False), (38, 0.0, "a", False), (224, 0.0, "a", False), (224, 0.0, "a", False)],
    steps=2,
    tenant="b",
    tenants="abc",
    paced=False,
)
def test_committed_tokens_are_before_everybodys_newcomer(
    rows: list[tuple[int, float, str, bool]], steps: int, tenant: str, tenants: str, paced: bool
) -> None:
    """With several tenants and shared prefixes in flight, at least that many tokens run before it. (docs: routing)"""
    line = Line(tenants, paced=paced)
    line.build(rows, steps)
    report = line.view.report(0.4)
    newcomer = line.queue("new", prompt(1, 9), 0.4, tenant)
    assert line.tokens_before(newcomer) >= report.committed_prefill_tokens
