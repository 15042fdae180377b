"""Roots of requests inside Ray Serve LLM: router and replica agree, and no two tenants share one."""

import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ray_llm.scopes import Scopes
from serve_app.ray_llm.tenant_header import RepeatedTenant

SALTS = st.none() | st.text(max_size=3)
NAMES = st.sampled_from(["authorization", "Authorization", "x-tenant", "x_tenant", "host"])
HEADERS = st.lists(st.tuples(NAMES, st.sampled_from(["", "a", "b"])), max_size=4)
ASKED = st.tuples(st.text(max_size=3), st.text(max_size=3), SALTS)


@pytest.fixture(autouse=True, scope="module")
def secret() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARMPATH_SECRET", "a secret of this test")
        yield


@given(one=ASKED, other=ASKED)
def test_any_difference_of_tenant_adapter_or_salt_is_another_root(one: tuple, other: tuple) -> None:
    scopes, again = Scopes("m", "authorization"), Scopes("m", "authorization")
    assert (scopes.root(*one) == again.root(*other)) == (one == other)


def test_models_and_secrets_have_roots_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes = Scopes("m", "")
    assert scopes.root("", "", None) != Scopes("n", "").root("", "", None)
    monkeypatch.setenv("WARMPATH_SECRET", "another secret of this test")
    assert scopes.root("", "", None) != Scopes("m", "").root("", "", None)
    assert scopes.check != Scopes("m", "").check


def test_a_tenant_is_the_headers_value_and_keys_are_kept_nowhere() -> None:
    scopes = Scopes("m", "X-Tenant")
    tenant = scopes.tenant_in({"x-tenant": "key of a"})
    assert tenant == scopes.tenant_of("key of a") != scopes.tenant_in({})
    assert "key" not in tenant
    assert Scopes("m", "").tenant_in({"authorization": "a"}) == "", "off means one tenant"


@given(headers=HEADERS, name=st.sampled_from(["Authorization", "X-Tenant", ""]))
def test_a_request_names_one_tenant(headers: list[tuple[str, str]], name: str) -> None:
    """Of two that differ, which one wins would depend on the path: such a request is refused. docs: ray-serve-llm"""
    scopes = Scopes("m", name)
    values = {value for header, value in headers if name and header.lower() == name.lower()}
    if len(values) > 1:
        with pytest.raises(RepeatedTenant, match=f"{name.lower()} is sent twice") as refused:
            scopes.tenant_in(headers)
        assert refused.value.status_code == 400
    else:
        assert scopes.tenant_in(headers) == scopes.tenant_of(next(iter(values), ""))


@pytest.mark.parametrize("word", ["lora", "salt"])
def test_a_clients_words_of_any_length_cost_no_memory(word: str) -> None:
    """They are remembered by their digests, and only so many."""
    scopes, chars = Scopes("m", "authorization"), 1 << 20
    tracemalloc.start()
    try:
        for number in range(64):
            text = f"{number}" + "x" * chars
            scopes.root("t", *(("", text) if word == "salt" else (text, None)))
        del text
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < chars
    for number in range(10_000):
        scopes.root("t", "", f"{number}")
    assert scopes._roots.cache_info().currsize <= 4096


def test_no_module_that_ray_loads_needs_torch_or_vllm() -> None:
    import subprocess

    names = "router, scopes, requests, cache_app"
    script = f"import sys; from serve_app.ray_llm import {names}; print({{'torch', 'vllm'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "set()\n"
