"""Keys name tenants, salts separate them, and the secret is the deployment's own."""

import asyncio
import hmac
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app import tenants as tenancy
from serve_app.config.live import BadSettings, app_config
from serve_app.config.tenants import TenantConfig
from serve_app.errors import AuthenticationFailed
from serve_app.replica.replica import Replica
from serve_app.tenants import SecretError, Tenant, Tenants, load_secret, make_api_key

SECRET = b"s" * 32
KEYS = {name: make_api_key() for name in ("acme", "acme2", "zeta", "operator")}


def header(name: str) -> str:
    return f"Bearer {KEYS[name][0]}"


def config(name: str, *keys: Any, **fields: Any) -> TenantConfig:
    return TenantConfig.model_validate({"name": name, "key_sha256": [*keys], **fields})


@pytest.fixture
def tenants() -> Tenants:
    acme, zeta = config("acme", KEYS["acme"][1], KEYS["acme2"][1]), config("zeta", KEYS["zeta"][1])
    return Tenants([acme, zeta], SECRET, operator_key_sha256=[KEYS["operator"][1]])


def test_keys_are_unguessable_and_stored_only_as_digests() -> None:
    key, digest = make_api_key()
    assert key.startswith("wp-") and len(key) >= 46
    assert digest == sha256(key.encode()).hexdigest()
    assert make_api_key()[0] != key


@pytest.mark.parametrize(("key", "name"), [("acme", "acme"), ("acme2", "acme"), ("zeta", "zeta")])
def test_every_key_of_a_tenant_names_it(tenants: Tenants, key: str, name: str) -> None:
    """The scheme is case-insensitive and spaces around the key do not matter; no tenant is an operator."""
    for sent in (header(key), f"bearer  {KEYS[key][0]} "):
        assert tenants.authenticate(sent) == Tenant(name)
        assert not tenants.is_operator(sent)


@pytest.mark.parametrize(
    "sent",
    [None, "", "Bearer", "Bearer ", "Bearer wp-wrong", "Bearer \udcff", f"Basic {KEYS['acme'][0]}", KEYS["acme"][0],
     f"Bearer {KEYS['acme'][1]}"],
    ids=["none", "empty", "scheme", "no key", "wrong", "surrogate", "basic", "bare key", "digest"],
)  # fmt: skip
def test_anything_else_is_refused(tenants: Tenants, sent: str | None) -> None:
    """Not even the stored digest is a key."""
    with pytest.raises(AuthenticationFailed) as caught:
        tenants.authenticate(sent)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert ("does not begin with `Bearer`" in caught.value.message) == (
        sent in (KEYS["acme"][0], f"Basic {KEYS['acme'][0]}")
    )
    assert not tenants.is_operator(sent)


def test_operators_are_known_by_their_own_keys(tenants: Tenants) -> None:
    """Without operator keys nobody is one; an operator key used as a tenant's gets an error of its own."""
    assert tenants.is_operator(header("operator"))
    assert not Tenants([], SECRET).is_operator(header("operator"))
    with pytest.raises(AuthenticationFailed, match="operator key cannot"):
        tenants.authenticate(header("operator"))


def test_a_key_is_found_by_its_digest_and_compared_in_constant_time(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many keys there are, one is compared, and only the constant-time function decides. (docs: isolation)"""
    compared: list[bytes] = []
    answers = hmac.compare_digest

    class Counting:
        @staticmethod
        def compare_digest(known: bytes, digest: bytes) -> bool:
            compared.append(known)
            return answers(known, digest)

    monkeypatch.setattr(tenancy, "hmac", Counting)
    tenants.authenticate(header("acme"))
    assert tenants.is_operator(header("operator"))
    assert compared == [bytes.fromhex(KEYS[name][1]) for name in ("acme", "operator")]
    answers = lambda known, digest: False  # noqa: E731
    assert not tenants.is_operator(header("operator"))
    with pytest.raises(AuthenticationFailed):
        tenants.authenticate(header("acme"))


@pytest.mark.parametrize("same_bytes", [1, 2, 4, 16, 31])
def test_all_of_a_keys_digest_counts(same_bytes: int) -> None:
    """A configured digest with the same beginning as the key's, but another end, is another key's."""
    key, digest = make_api_key()
    other = digest[: 2 * same_bytes] + "".join("%x" % (15 - int(digit, 16)) for digit in digest[2 * same_bytes :])
    tenants = Tenants([config("acme", other)], SECRET, operator_key_sha256=[other])
    with pytest.raises(AuthenticationFailed):
        tenants.authenticate(f"Bearer {key}")
    assert not tenants.is_operator(f"Bearer {key}")


def test_without_tenants_everybody_is_the_default_one(tenants: Tenants) -> None:
    """``open`` is true, for a warning at start-up."""
    nobody = Tenants([], SECRET)
    assert nobody.open and not tenants.open
    assert nobody.authenticate(None) == nobody.authenticate("Bearer x") == Tenant("default")
    assert nobody.by_name == {"default": Tenant("default")}


DIGEST, OTHER = KEYS["acme"][1], KEYS["zeta"][1]


@pytest.mark.parametrize(
    ("tenants", "operators", "said"),
    [
        ([{"name": "a", "key_sha256": [DIGEST]}, {"name": "b", "key_sha256": [DIGEST]}], [], "given twice"),
        ([{"name": "a", "key_sha256": [DIGEST, {"sha256": DIGEST}]}], [], "given twice"),
        ([{"name": "a", "key_sha256": [DIGEST]}], [DIGEST], "given twice"),
        ([{"name": "", "key_sha256": [DIGEST]}], [], "name"),
        ([{"name": "a b", "key_sha256": [DIGEST]}], [], "name"),
        ([{"name": "a", "key_sha256": []}], [], "key_sha256"),
        ([{"name": "a", "key_sha256": [KEYS["acme"][0]]}], [], "64 hex digits"),
        ([{"name": "a", "key_sha256": [{"sha256": DIGEST, "expires": "2027-01-31T00:00:00"}]}], [], "time zone"),
        ([{"name": "a", "key_sha256": [{"sha256": DIGEST, "expires": "soon"}]}], [], "such as 2027-01-31T00:00:00Z"),
        *(([], [key], "64 hex digits") for key in ("abcd", KEYS["operator"][0], "g" * 64, "")),
    ],
)
def test_a_wrong_or_ambiguous_setting_is_refused(tenants: list[Any], operators: list[str], said: str) -> None:
    """The main mistake is a plain key in place of its digest; the error explains how to make one."""
    with pytest.raises(BadSettings, match=said):
        app_config({"tenants": tenants, "operator_key_sha256": operators})


def test_a_key_is_written_as_its_digest_or_with_its_limits() -> None:
    assert config("a", DIGEST) == config("a", {"sha256": DIGEST})
    limited = {"sha256": OTHER, "expires": "2027-01-31T00:00:00Z", "revoked": True}
    settings = app_config({"tenants": [{"name": "a", "key_sha256": [DIGEST, limited]}]})
    assert app_config(settings.to_json()) == settings


def test_tenants_and_keys_may_change_at_any_time(tenants: Tenants) -> None:
    salt = tenants.salt(Tenant("acme"), None)
    tenants.configure([config("acme", KEYS["acme2"][1], trust_group="friends")], [])
    assert tenants.authenticate(header("acme2")) == Tenant("acme", "friends") == tenants.by_name["acme"]
    for removed in ("acme", "zeta"):
        with pytest.raises(AuthenticationFailed):
            tenants.authenticate(header(removed))
    assert not tenants.has_operators and not tenants.is_operator(header("operator"))
    assert tenants.salt(Tenant("acme"), None) == salt


def test_only_its_holder_learns_that_a_key_expired_or_was_revoked() -> None:
    """Both are a 401 like an unknown key's; a tenant's other keys work, and without a valid key it has no access.

    docs: tenants
    """
    now_s = datetime(2027, 1, 31, tzinfo=UTC).timestamp()
    keys = [
        {"sha256": KEYS["acme"][1], "expires": "2027-01-31T01:00:00+01:00"},
        {"sha256": KEYS["acme2"][1], "expires": "2027-01-31T00:00:01Z"},
        {"sha256": KEYS["zeta"][1], "revoked": True},
    ]
    tenants = Tenants([config("acme", *keys)], SECRET, now_s=lambda: now_s)
    assert tenants.authenticate(header("acme2")) == Tenant("acme")
    for key, sentence in (("acme", "expired at 2027-01-31T00:00:00"), ("zeta", "revoked"), ("operator", "No tenant")):
        with pytest.raises(AuthenticationFailed, match=sentence) as caught:
            tenants.authenticate(header(key))
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    now_s += 1
    with pytest.raises(AuthenticationFailed, match="expired"):
        tenants.authenticate(header("acme2"))
    assert not tenants.open


@given(st.integers(1, 10**6), st.permutations([-1000.0, -1.0, 0.0, 0.5, 1.0, 2.0, 1000.0]))
def test_a_key_opens_until_its_end_wherever_the_clock_goes(life_s: int, times: list[float]) -> None:
    """In any order: a clock that is set back makes it valid again, one that is set ahead ends it."""
    begin = datetime(2027, 1, 31, tzinfo=UTC)
    now_s = begin.timestamp()
    ends = (begin + timedelta(seconds=life_s)).isoformat()
    tenants = Tenants([config("acme", {"sha256": KEYS["acme"][1], "expires": ends})], SECRET, now_s=lambda: now_s)
    for time in times:
        now_s = begin.timestamp() + time * life_s
        if time < 1:
            assert tenants.authenticate(header("acme")) == Tenant("acme")
        else:
            with pytest.raises(AuthenticationFailed, match="expired"):
                tenants.authenticate(header("acme"))


WORDS = st.text("ab\0\1\2", min_size=1, max_size=4)


@given(st.lists(st.tuples(WORDS, st.none() | WORDS, st.none() | st.text("ab\0\1\2", max_size=4)), max_size=6))
def test_only_one_tenant_or_group_with_one_cache_salt_has_a_salt(
    asked: list[tuple[str, str | None, str | None]],
) -> None:
    """For any values: ("a", "bc") and ("ab", "c") differ, as do none and "", and a tenant named like a group.

    Two processes with one secret agree; another deployment has other salts. (docs: isolation)
    """
    tenants, same, other = Tenants([], SECRET), Tenants([], SECRET), Tenants([], b"t" * 32)
    salts = [tenants.salt(Tenant(name, group), salt) for name, group, salt in asked]
    for (one, one_salt), (two, two_salt) in combinations(zip(asked, salts, strict=True), 2):
        equal = one[1:] == two[1:] and (one[1] is not None or one[0] == two[0])
        assert (one_salt == two_salt) == equal
    for (name, group, cache_salt), salt in zip(asked, salts, strict=True):
        assert len(salt) == 32
        assert same.salt(Tenant(name, group), cache_salt) == salt != other.salt(Tenant(name, group), cache_salt)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("WARMPATH_SECRET", raising=False)
    return tmp_path / "deep" / "state"


def test_the_secret_is_made_once_and_private(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many concurrent starters agree on one secret, in a file only for its owner, and leave nothing else behind.

    Without a directory of its own it is in the user's state directory.
    """
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: load_secret(state_dir=state), range(32)))
    assert [len(secret) for secret in found] == [32]
    assert stat.S_IMODE((state / "secret").stat().st_mode) == 0o600
    assert [path.name for path in state.iterdir()] == ["secret"]
    monkeypatch.setenv("XDG_STATE_HOME", str(state.parent / "other"))
    own = load_secret()
    assert own not in found
    assert own == sha256((state.parent / "other/warmpath/secret").read_bytes().strip()).digest()


def test_the_environment_goes_before_the_file_and_the_file_before_the_state(
    state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """White space around a secret is not part of it."""
    file = tmp_path / "secret.txt"
    file.write_text("from the file, long enough\n")
    file.chmod(0o600)
    assert load_secret(secret_file=file, state_dir=state) == sha256(b"from the file, long enough").digest()
    assert not state.exists()
    monkeypatch.setenv("WARMPATH_SECRET", " from the environment ")
    assert load_secret(secret_file=file, state_dir=state) == sha256(b"from the environment").digest()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_that_others_may_touch_is_refused(state: Path, mode: int) -> None:
    """The sentence has the command that repairs it. (docs: isolation)"""
    load_secret(state_dir=state)
    (state / "secret").chmod(mode)
    with pytest.raises(SecretError, match="chmod 600"):
        load_secret(state_dir=state)


@pytest.mark.parametrize("secret", ["", "short", " " * 40])
def test_a_short_secret_is_refused(state: Path, monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    """An empty variable is refused too: a deployment that lost its secret must not quietly make another."""
    monkeypatch.setenv("WARMPATH_SECRET", secret)
    with pytest.raises(SecretError, match="needs 16"):
        load_secret(state_dir=state)


def test_a_named_file_must_exist_and_a_state_directory_must_be_makeable(state: Path, tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="no secret file"):
        load_secret(secret_file=tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(SecretError, match=r"set \$WARMPATH_SECRET instead"):
        load_secret(state_dir=tmp_path / "file" / "state")


def test_a_replica_drops_the_secret_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither it nor the processes of its engine have it while they run. (docs: isolation)"""
    monkeypatch.setenv("WARMPATH_SECRET", "a secret of this test")

    async def stop(config: Any) -> None:
        raise LookupError("the environment is looked at here")

    monkeypatch.setattr("serve_app.replica.replica.LiveSettings.start", stop)
    monkeypatch.setattr("serve_app.replica.replica.log_at_once", lambda: None)  # it is for the rest of a process
    with pytest.raises(LookupError):
        asyncio.run(Replica.__init__(SimpleNamespace(), {}))  # type: ignore[arg-type]
    shown = subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True).stdout
    assert "WARMPATH" not in shown
