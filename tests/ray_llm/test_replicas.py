"""Replicas die, are replaced and are added while requests arrive. Last of the tests of a deployment."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx

from tests.integration.conftest import eventually
from tests.ray_llm.conftest import LlmApp, cached, chat_body, key_of
from tests.ray_llm.test_paths import TEXT, predicted

CLIENTS = 4
START_S = 300


def test_a_death_costs_the_requests_in_flight_and_a_new_replica_is_known_before_its_first_request(app: LlmApp) -> None:
    texts = [f"{number} of those that are asked again and again. " + TEXT * 10 for number in range(8)]
    for text in texts:
        app.chat(text)
    stop, errors, answered = Event(), [], []

    def ask(client: int) -> None:
        with httpx.Client(timeout=120) as door:
            while not stop.is_set():
                for text in texts[client::CLIENTS]:
                    url = f"{app.ray.url}/v1/chat/completions"
                    try:
                        answer = door.post(url, json=chat_body(text), headers=key_of("a")).raise_for_status()
                        answered.append(cached(answer.json()))
                    except httpx.HTTPError as error:
                        errors.append(repr(error))

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask, client) for client in range(CLIENTS)]
        try:
            eventually(lambda: len(answered) >= 20)
            before = {replica["replica_id"] for replica in app.state()["replicas"]}
            app.ray.replicas("llm")[0].kill()
            eventually(lambda: before - {row["replica_id"] for row in app.state().get("replicas", [])}, START_S)
            enough = len(answered) + 50
            eventually(lambda: len(answered) >= enough, START_S)
            after = answered[enough - 10 : enough]
            eventually(lambda: len(app.state().get("replicas", [])) == 2, START_S)
            enough = len(answered) + 20
            eventually(lambda: len(answered) >= enough, START_S)
        finally:
            stop.set()
        for each in asking:
            each.result()
    assert len(errors) <= CLIENTS, errors
    assert all(after), "blocks lost with a replica were computed again within 50 requests"
    assert max(predicted(app, texts[0], "a")) > 0
