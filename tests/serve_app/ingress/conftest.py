"""The real clients of both APIs, in front of an ingress with scripted model output."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.serve_app.ingress.apis import Clients, clients_of
from tests.serve_app.ingress.scripted import Script, scripted
from tests.serve_app.tool_templates.families import family


@pytest.fixture(scope="package")
def hermes(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Script]]:
    """An ingress in front of a model that calls tools, and its script."""
    path = family("hermes", demo_model_path, tmp_path_factory.mktemp("family") / "hermes")
    with scripted(path, place="first") as served:
        yield served


@pytest.fixture
def script(hermes: tuple[str, Script]) -> Script:
    hermes[1].clear()
    return hermes[1]


@pytest.fixture
def clients(hermes: tuple[str, Script]) -> Iterator[Clients]:
    with clients_of(hermes[0]) as made:
        yield made


@pytest.fixture
def client(clients: Clients) -> OpenAI:
    return clients.openai


@pytest.fixture
def anthropic_client(clients: Clients) -> Anthropic:
    return clients.anthropic
