"""Work that yields (flex, and batches) prefills with what others leave, gives its place up for them, and still ends."""

from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.engine.scheduling.scheduler import QUIET_STEPS
from serve_app.fairness.queue import YIELDING_ORDER
from tests.serve_app.engine.scheduling.bench import Bench
from tests.serve_app.engine.tiny import prompt

FLEX = 2**32
"""The order of the tier; priorities within it move it by less than ``YIELDING_ORDER``."""


def test_others_prompts_go_first_whoever_asks() -> None:
    """Another tenant's prompt takes the whole step from a prompt that yields and has begun; docs: api"""
    bench = Bench("a", "b", num_blocks=1024)
    bench.add("flex", prompt(640, 1), 1, tenant="a", order=FLEX)
    assert bench.step() == [("flex", 64)]
    bench.add("new", prompt(160, 2), 1, tenant="b")
    assert [bench.step() for _ in range(3)] == [[("new", 64)], [("new", 64)], [("new", 32), ("flex", 16)]]
    assert bench.step() == [("flex", 64)]


def test_beside_others_decodes_a_step_grows_by_a_thirty_second() -> None:
    """At 5,000 tokens a second beside steps of 0.4 s: 2,000 tokens would double them.

    Soon after the others, steps are as long as one of decodes, and whole once nobody came for long.
    """
    bench = Bench("a", "b", num_blocks=8192, max_num_batched_tokens=4096)
    bench.add("chat", prompt(16, 1), 9, tenant="a")
    bench.step()
    bench.add("flex", prompt(4000, 2), 1, tenant="b", order=FLEX)
    assert bench.step(5000.0, 0.01) == [("chat", 1), ("flex", 1)]
    while bench.scheduler.find("chat"):
        bench.step(5000.0, 0.01)
    assert bench.step(5000.0, 0.01) == [("flex", 50)]
    bench.add("more", prompt(100_000, 3), 1, tenant="b", order=FLEX)
    for _ in range(QUIET_STEPS):
        bench.step(5000.0, 0.01)
    assert sum(tokens for _, tokens in bench.step(5000.0, 0.01)) == 512


def test_slots_and_blocks_are_given_up() -> None:
    """The last started one goes, only where it helps, and continues later from its cached blocks."""
    for overrides in ({"max_num_seqs": 2, "num_blocks": 64}, {"max_num_seqs": 9, "num_blocks": 20}):
        bench = Bench("a", **overrides)
        for number in (1, 2):
            bench.add(f"flex {number}", prompt(100, number), 40, tenant="a", order=FLEX)
        while len(bench.started_s) < 2:
            bench.step()
        for _ in range(3):
            bench.step()
        bench.add("chat", prompt(100, 3), 2, tenant="a")
        bench.step()
        assert [sequence.request.request_id for sequence in bench.scheduler.preempted] in ([], ["flex 2"])
        steps = 0
        while "chat" not in bench.started_s:
            bench.step()
            steps += 1
        assert steps <= 2
        while bench.scheduler.running or bench.scheduler.waiting:
            bench.step()


def test_who_waits_for_its_blocks_is_not_held_up_by_others() -> None:
    """A request whose prompt a yielding one is computing: that one takes its turns as if it did not yield."""
    bench = Bench("a", "b", num_blocks=1024)
    shared = prompt(640, 1)
    bench.add("flex", shared, 1, tenant="a", order=FLEX)
    bench.step()
    bench.add("waits", shared, 1, tenant="a")
    bench.step()
    for number in range(20):
        bench.add(f"other {number}", prompt(640, 10 + number), 1, tenant="b")
    served = [name for _ in range(30) for name, _ in bench.step()]
    assert "waits" in bench.started_s
    assert served.count("flex") >= 9


@example([(0, "a", FLEX), (0, "a", FLEX), (0, "b", 0)], 1)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.sampled_from("ab"), st.sampled_from([0, 1, YIELDING_ORDER - 1, FLEX - 9, FLEX])
        ),
        min_size=2,
        max_size=16,
    ),
    st.integers(1, 3),
)
def test_all_end_and_none_that_yields_prefills_while_another_could(
    coming: list[tuple[int, str, int]], slots: int
) -> None:
    """In a pool for few of them, with slots for few of them."""
    bench = Bench("a", "b", num_blocks=24, max_num_seqs=slots)
    left, at_step = list(enumerate(coming)), 0
    for _ in range(4000):
        while left and left[0][1][0] <= at_step:
            number, (_, tenant, order) = left.pop(0)
            bench.add(str(number), prompt(70 + 16 * (number % 3), number % 4), 20, tenant=tenant, order=order)
            at_step = 0
        at_step += 1
        if not left and not bench.scheduler.running and not bench.scheduler.waiting:
            return
        bench.step()
    raise AssertionError("some never end")
