"""The front door returns 429 to floods and to nobody else, and counts nothing forever."""

import asyncio

import pytest

from serve_app.errors import RateLimited
from serve_app.fairness.front_door import ASKED_S, BESIDE_PART, Arrival, FrontDoor
from serve_app.fairness.queue import YIELDING_ORDER
from serve_app.fairness.shares import Shares
from tests.harness.eventually import let_others_run

MIB = 1 << 20


def door_of(places: int = 4, max_waiting: int = 16, max_bytes: int = 64 * MIB) -> FrontDoor:
    return FrontDoor(Shares({"a": 1.0, "b": 1.0}), places=lambda: places, max_waiting=max_waiting, max_bytes=max_bytes)


@pytest.mark.anyio
async def test_the_flooder_is_refused_and_nobody_else() -> None:
    """The last eighth of the shared queue is for others; the refusal has a time to retry. (docs: routing)"""
    door = door_of()
    inside: list[Arrival] = []
    with pytest.raises(RateLimited) as refused:
        while True:
            inside.append(door.arrive("a"))
    assert len(inside) == 14
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 1
    assert "Too many of your requests" in str(refused.value)
    with door.arrive("b") as other:
        await other.turn(1)
        other.hand_over().give_back()
    for arrival in inside:
        arrival.release()
    assert door.taken() == (0, 0, 0)


def test_a_tenant_within_its_share_is_not_blamed_for_a_full_queue() -> None:
    """Others fill the queue; a tenant within its share is refused because of that, and the sentence explains it."""
    tenants = dict.fromkeys("abcdefgh", 1.0)
    door = FrontDoor(Shares(tenants), places=lambda: 4, max_waiting=8, max_bytes=MIB)
    inside = [door.arrive(tenant) for tenant in tenants]
    with pytest.raises(RateLimited, match="There is no capacity for your request: too many requests wait") as refused:
        door.arrive("i")
    assert "your requests" not in str(refused.value)
    for arrival in inside:
        arrival.release()


@pytest.mark.anyio
async def test_work_that_can_wait_is_beside_a_long_answer_however_many_of_it_are_on_their_way() -> None:
    """Nobody came for a long time, but one is answered: what has started and is not here yet is not that one."""
    now_s = 0.0
    door = FrontDoor(Shares({}), places=lambda: 4 * BESIDE_PART, max_waiting=8, max_bytes=MIB, clock=lambda: now_s)
    with door.arrive("a") as arrival:
        await arrival.turn(1)
        long = arrival.hand_over()
    now_s = 60.0
    assert [door.is_quiet("batch", asking) for asking in range(6)] == [True] * 4 + [False] * 2
    here = []
    for _ in range(3):
        with door.arrive("batch") as arrival:
            await arrival.turn(1, YIELDING_ORDER, flex=True)
            here.append(arrival.hand_over())
    assert [door.is_quiet("batch", asking) for asking in (3, 4)] == [True, False]
    long.give_back()
    assert [door.is_quiet("batch", asking) for asking in (3, 3 * BESIDE_PART - 1, 3 * BESIDE_PART)] == [
        True, True, False
    ]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("places", "others", "lines"), [(1, 1, 0), (2, 1, 0), (4, 1, 1), (12, 1, 1), (12, 8, 1), (12, 9, 0), (64, 46, 2)]
)
async def test_a_small_deployment_has_a_place_for_work_that_can_wait(places: int, others: int, lines: int) -> None:
    """Beside steady light traffic a batch goes on; a quarter of the places stays free for who comes next."""
    door = door_of(places)
    running = []
    for _ in range(others):
        with door.arrive("a") as arrival:
            await arrival.turn(1)
            running.append(arrival.hand_over())
    assert [door.is_quiet("batch", asking) for asking in range(3)] == [asking < lines for asking in range(3)]


@pytest.mark.anyio
async def test_flex_leaves_half_of_the_waiting_room() -> None:
    """A tenant's flex requests do not cause its other requests to be refused. (docs: routing)"""
    door = door_of(places=1)
    with door.arrive("a") as first:
        await first.turn(1, flex=True)
        place = first.hand_over()
    inside = [door.arrive("a") for _ in range(5)]
    with pytest.raises(RateLimited, match="Too many of your requests wait") as refused:
        await inside[4].turn(1, flex=True)
    assert (refused.value.code, refused.value.status) == ("resource_unavailable", 429)
    inside.pop().release()
    turns = [asyncio.create_task(inside[0].turn(1, 2**32, flex=True)), asyncio.create_task(inside[1].turn(1))]
    await let_others_run()
    place.give_back()
    await turns[1]
    assert not turns[0].done(), "flex does not wait for the others"
    inside[1].release()
    await turns[0]
    for arrival in inside:
        arrival.release()
    assert door.taken() == (0, 0, 0)


def test_bodies_are_bounded_by_tenant() -> None:
    """One tenant's large bodies leave space for another's; bytes of unannounced length are counted on arrival."""
    door = door_of()
    bodies = [door.arrive("a") for _ in range(7)]
    for arrival in bodies:
        arrival.grow(4 * MIB)
        arrival.grow(4 * MIB)
    with door.arrive("a") as one_more, pytest.raises(RateLimited, match="bytes"):
        one_more.grow(8 * MIB)
    with door.arrive("b") as other:
        other.grow(8 * MIB)
    for arrival in bodies:
        arrival.release()
        arrival.release()
    assert door.taken() == (0, 0, 0)


@pytest.mark.anyio
async def test_leaving_frees_everything_but_a_place_handed_over() -> None:
    """A request that fails after its turn returns its place; one that continues keeps it until its end."""
    door = door_of()
    with pytest.raises(KeyError), door.arrive("a") as arrival:
        arrival.grow(100)
        await arrival.turn(3)
        raise KeyError
    assert door.taken() == (0, 0, 0)
    with door.arrive("a") as arrival:
        arrival.grow(100)
        await arrival.turn(2)
        place = arrival.hand_over()
    assert door.taken() == (0, 0, 2)
    place.give_back()
    assert door.taken() == (0, 0, 0)


def test_costs_are_learned_by_tenant() -> None:
    """A tenant with cached prompts is charged less for the same bytes than one with new prompts."""
    door = door_of()
    assert door.cost_tokens("a", 4000) == door.cost_tokens("b", 4000) == 1000
    for _ in range(40):
        door.learn("a", 4000, 10)
        door.learn("b", 4000, 1300)
    assert door.cost_tokens("a", 4000) < 20
    assert door.cost_tokens("b", 4000) > 1200


@pytest.mark.anyio
@pytest.mark.parametrize("times", [0.0, 0.5, 0.99, 1.0, 2.0, 1000.0])
async def test_who_needs_a_first_replica_is_told_while_it_waits_and_for_a_while_after(times: float) -> None:
    """A request that no replica could answer in its time, or that another model answered, asks for one all the same.

    One that a limit refuses asks for none: it would start a model that answers nobody.
    """
    now_s = 0.0
    door, other = (
        FrontDoor(Shares({}), places=lambda: 2, max_waiting=8, max_bytes=MIB, clock=lambda: now_s) for _ in range(2)
    )
    assert door.asking() == 0
    with door.arrive("a") as refused:
        await refused.turn(1)
    assert door.asking() == 0
    with door.arrive("a") as arrival:
        await arrival.turn(1)
        place = arrival.hand_over()
    now_s += 1000.0 * ASKED_S
    assert door.asking() == 1, "it waits for a replica"
    place.give_back()
    assert door.asking() == 0
    with other.arrive("a") as elsewhere:
        elsewhere.move(door)
        elsewhere.move(other, instead_of=door)
        await elsewhere.turn(1)
        elsewhere.hand_over().give_back()
    now_s += times * ASKED_S
    assert [door.asking(), other.asking()] == [int(times < 1.0)] * 2
