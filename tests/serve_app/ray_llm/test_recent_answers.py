"""A replica's latest answers are numbered, bounded, and open nothing."""

from serve_app.ray_llm.recent_answers import KEPT, RecentAnswer, RecentAnswers


def answer(request_id: str) -> RecentAnswer:
    return request_id, "t", b"chain", 100, 32, 0.1


def test_answers_are_told_once_and_the_oldest_are_forgotten() -> None:
    answers = RecentAnswers()
    for number in range(2 * KEPT):
        answers.add(answer(f"chatcmpl-{number}"))
    assert answers.since(2 * KEPT) == []
    assert answers.since(2 * KEPT - 2) == [answer(f"chatcmpl-{2 * KEPT - 2}"), answer(f"chatcmpl-{2 * KEPT - 1}")]
    assert [one[0] for one in answers.since(0)] == [f"chatcmpl-{number}" for number in range(KEPT, 2 * KEPT)]


def test_the_name_of_a_response_is_not_shown() -> None:
    """Where vLLM stores responses, their ids open their text, and events are shown to watchers."""
    answers = RecentAnswers()
    answers.add(answer("resp_123"))
    ((shown, *others),) = answers.since(0)
    assert others == list(answer(""))[1:] and len(shown) == 32
    assert "123" not in shown
