"""Keys name tenants, salts keep them apart, and the secret is the deployment's own."""

from __future__ import annotations

import hmac
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from hashlib import sha256
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serve_app.config.live import BadSettings, app_config
from serve_app.config.tenants import TenantConfig
from serve_app.errors import AuthenticationFailed
from serve_app.tenants import tenants as tenancy
from serve_app.tenants.secret import SecretError, load_secret
from serve_app.tenants.tenants import Tenant, Tenants, make_api_key

SECRET = b"s" * 32
KEYS = {name: make_api_key() for name in ("acme", "acme2", "zeta", "operator")}


@pytest.fixture
def tenants() -> Tenants:
    return Tenants(
        [
            TenantConfig(name="acme", key_sha256=[KEYS["acme"][1], KEYS["acme2"][1]]),
            TenantConfig(name="zeta", key_sha256=[KEYS["zeta"][1]]),
        ],
        SECRET,
        operator_key_sha256=[KEYS["operator"][1]],
    )


def test_keys_are_unguessable_and_stored_only_as_digests() -> None:
    """A key has its prefix and 256 random bits; the digest is of the whole key."""
    key, digest = make_api_key()
    assert key.startswith("wp-")
    assert len(key) >= 46
    assert digest == sha256(key.encode()).hexdigest()
    assert make_api_key()[0] != key


@pytest.mark.parametrize(("key", "name"), [("acme", "acme"), ("acme2", "acme"), ("zeta", "zeta")])
def test_every_key_of_a_tenant_names_it(tenants: Tenants, key: str, name: str) -> None:
    """The scheme is case-insensitive and spaces around the key do not matter."""
    for header in (f"Bearer {KEYS[key][0]}", f"bearer  {KEYS[key][0]} "):
        assert tenants.authenticate(header) == Tenant(name)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wp-wrong", "Bearer \udcff", f"Basic {KEYS['acme'][0]}", KEYS["acme"][0],
     f"Bearer {KEYS['acme'][1]}", f"Bearer {KEYS['operator'][0]}"],
    ids=["none", "empty", "scheme", "no key", "wrong", "surrogate", "basic", "bare key", "digest", "operator"],
)  # fmt: skip
def test_anything_else_is_refused(tenants: Tenants, header: str | None) -> None:
    """Not even the stored digest, or an operator's key, is a tenant's key."""
    with pytest.raises(AuthenticationFailed) as caught:
        tenants.authenticate(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_every_key_is_compared_even_after_a_match(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of constant-time comparisons does not depend on which key was sent. (docs/security.md)"""
    compared: list[bytes] = []

    def counting(known: bytes, digest: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(known, digest)

    class Counting:
        compare_digest = staticmethod(counting)

    monkeypatch.setattr(tenancy, "hmac", Counting)
    tenants.authenticate(f"Bearer {KEYS['acme'][0]}")
    assert len(compared) == 3


def test_an_operators_key_that_is_used_as_a_tenants_is_told_so(tenants: Tenants) -> None:
    """Whoever holds one need not look for a typo in it."""
    with pytest.raises(AuthenticationFailed, match="operator key cannot"):
        tenants.authenticate(f"Bearer {KEYS['operator'][0]}")


def test_operators_are_known_by_their_own_keys(tenants: Tenants) -> None:
    """A tenant is no operator, and without operator keys nobody is."""
    assert tenants.is_operator(f"Bearer {KEYS['operator'][0]}")
    assert not tenants.is_operator(f"Bearer {KEYS['acme'][0]}")
    assert not tenants.is_operator(None)
    assert not Tenants([], SECRET).is_operator(f"Bearer {KEYS['operator'][0]}")


def test_without_tenants_everybody_is_the_default_one(tenants: Tenants) -> None:
    """``open`` says so, for a warning at start-up."""
    nobody = Tenants([], SECRET)
    assert nobody.open
    assert not tenants.open
    assert nobody.authenticate(None) == nobody.authenticate("Bearer x") == Tenant("default")


@pytest.mark.parametrize(
    ("names", "keys"),
    [(("a", "a"), ("acme", "zeta")), (("a", "b"), ("acme", "acme")), (("a", "b"), ("acme", "operator"))],
)
def test_ambiguous_configurations_are_refused(names: tuple[str, str], keys: tuple[str, str]) -> None:
    """One name twice, one key for two tenants, or one key for a tenant and an operator."""
    configs = [{"name": name, "key_sha256": [KEYS[key][1]]} for name, key in zip(names, keys, strict=True)]
    with pytest.raises(BadSettings, match=r"same name|given twice"):
        app_config({"tenants": configs, "operator_key_sha256": [KEYS["operator"][1]]})


@pytest.mark.parametrize(
    "config",
    [
        {"name": "", "key_sha256": [KEYS["acme"][1]]},
        {"name": "a b", "key_sha256": [KEYS["acme"][1]]},
        {"name": "a", "key_sha256": []},
        {"name": "a", "key_sha256": [KEYS["acme"][0]]},
        {"name": "a", "key_sha256": [KEYS["acme"][1]], "keys": []},
    ],
)
def test_a_wrong_tenant_setting_is_refused(config: dict[str, object]) -> None:
    """A plain key where its digest belongs, above all."""
    with pytest.raises(ValidationError):
        TenantConfig.model_validate(config)


@pytest.mark.parametrize("key", ["abcd", KEYS["operator"][0], "g" * 64, ""], ids=["short", "key", "letters", "empty"])
def test_an_operator_key_that_is_no_digest_is_refused(key: str) -> None:
    """The sentence says how to make one."""
    with pytest.raises(ValueError, match="64 hex digits"):
        app_config({"operator_key_sha256": [key]})


def test_tenants_and_keys_may_change_at_any_time(tenants: Tenants) -> None:
    """A new key opens, a removed one does not, and a tenant that stays has the salt that it had."""
    salt = tenants.salt(Tenant("acme"), None)
    tenants.configure([TenantConfig(name="acme", key_sha256=[KEYS["acme2"][1]])], [])
    assert tenants.authenticate(f"Bearer {KEYS['acme2'][0]}") == Tenant("acme")
    for gone in ("acme", "zeta"):
        with pytest.raises(AuthenticationFailed):
            tenants.authenticate(f"Bearer {KEYS[gone][0]}")
    assert not tenants.has_operators and not tenants.is_operator(f"Bearer {KEYS['operator'][0]}")
    assert tenants.salt(Tenant("acme"), None) == salt


SCOPES = st.tuples(st.text("ab\0\1\2", min_size=1, max_size=4), st.none() | st.text("ab\0\1\2", max_size=4))


@given(scopes=st.lists(SCOPES, min_size=2, max_size=6, unique=True))
def test_different_tenants_and_salts_share_no_salt(scopes: list[tuple[str, str | None]]) -> None:
    """Whatever a tenant sends as ``cache_salt``: ("a", "bc") and ("ab", "c") differ, and so do none and "".

    docs/security.md
    """
    tenants = Tenants([], SECRET)
    salts = [tenants.salt(Tenant(name), salt) for name, salt in scopes]
    assert all(a != b for a, b in combinations(salts, 2))
    assert {len(salt) for salt in salts} == {32}


NAMES = st.from_regex(r"[a-z][a-z.-]{0,3}", fullmatch=True)


@given(st.lists(st.tuples(NAMES, st.none() | NAMES, st.none() | st.text(max_size=3)), min_size=2, max_size=6))
def test_only_members_of_one_group_with_one_salt_share_a_salt(asked: list[tuple[str, str | None, str | None]]) -> None:
    """Neither does a group named like a tenant share with it, nor two groups, nor a member with a salt of its own."""
    tenants = Tenants([], SECRET)
    for one, other in combinations(asked, 2):
        same = one[1:] == other[1:] and (one[1] is not None or one[0] == other[0])
        salts = [tenants.salt(Tenant(name, group), salt) for name, group, salt in (one, other)]
        assert (salts[0] == salts[1]) == same


def test_a_key_names_the_tenants_group() -> None:
    key, digest = make_api_key()
    tenants = Tenants([TenantConfig(name="acme", key_sha256=[digest], trust_group="friends")], SECRET)
    assert tenants.authenticate(f"Bearer {key}") == Tenant("acme", "friends") == tenants.by_name["acme"]
    assert Tenants([], SECRET).by_name["default"] == Tenant("default")


def test_only_its_holder_learns_that_a_key_expired_or_was_revoked() -> None:
    """Both are a 401 like an unknown key's; a tenant's other keys open, and one without a good one is closed.

    docs/tenants.md
    """
    now_s = datetime(2027, 1, 31, tzinfo=UTC).timestamp()
    keys = [
        {"sha256": KEYS["acme"][1], "expires": "2027-01-31T01:00:00+01:00"},
        {"sha256": KEYS["acme2"][1], "expires": "2027-01-31T00:00:01Z"},
        {"sha256": KEYS["zeta"][1], "revoked": True},
    ]
    config = TenantConfig.model_validate({"name": "acme", "key_sha256": keys})
    tenants = Tenants([config], SECRET, now_s=lambda: now_s)
    assert tenants.authenticate(f"Bearer {KEYS['acme2'][0]}") == Tenant("acme")
    for key, sentence in (("acme", "expired at 2027-01-31T00:00:00"), ("zeta", "revoked"), ("operator", "No tenant")):
        with pytest.raises(AuthenticationFailed, match=sentence) as caught:
            tenants.authenticate(f"Bearer {KEYS[key][0]}")
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    now_s += 1
    with pytest.raises(AuthenticationFailed, match="expired"):
        tenants.authenticate(f"Bearer {KEYS['acme2'][0]}")
    assert not tenants.open


def test_a_key_is_written_as_its_digest_or_with_what_limits_it() -> None:
    """Both forms are one when they are read, and what is written out reads back equal."""
    plain = TenantConfig.model_validate({"name": "a", "key_sha256": [KEYS["acme"][1]]})
    assert plain == TenantConfig.model_validate({"name": "a", "key_sha256": [{"sha256": KEYS["acme"][1]}]})
    limited = {"sha256": KEYS["zeta"][1], "expires": "2027-01-31T00:00:00Z", "revoked": True}
    config = app_config({"tenants": [{"name": "a", "key_sha256": [KEYS["acme"][1], limited]}]})
    assert app_config(config.to_json()) == config
    with pytest.raises(BadSettings, match="given twice"):
        app_config({"tenants": [{"name": "a", "key_sha256": [KEYS["acme"][1], {"sha256": KEYS["acme"][1]}]}]})
    for wrong, remedy in (("2027-01-31T00:00:00", "time zone"), ("soon", "such as 2027-01-31T00:00:00Z")):
        key = {"sha256": KEYS["acme"][1], "expires": wrong}
        with pytest.raises(BadSettings, match=remedy):
            app_config({"tenants": [{"name": "a", "key_sha256": [key]}]})


def test_salts_depend_on_the_secret_and_on_nothing_else() -> None:
    """Two processes with one secret agree; another deployment's salts are other ones. (docs/security.md)"""
    one, same, other = Tenants([], SECRET), Tenants([], SECRET), Tenants([], b"t" * 32)
    assert one.salt(Tenant("a"), "x") == same.salt(Tenant("a"), "x") != other.salt(Tenant("a"), "x")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("WARMPATH_SECRET", raising=False)
    return tmp_path / "deep" / "state"


def test_the_secret_is_made_once_and_private(state: Path) -> None:
    """Many starters at once agree on one secret, in a file for its owner alone, and leave nothing else behind."""
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: load_secret(state_dir=state), range(32)))
    assert len(found) == 1
    assert {len(secret) for secret in found} == {32}
    assert stat.S_IMODE((state / "secret").stat().st_mode) == 0o600
    assert [path.name for path in state.iterdir()] == ["secret"]
    assert load_secret(state_dir=state.parent / "other") not in found


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


def test_the_state_directory_follows_xdg(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a directory of its own the secret lies where state belongs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    secret = load_secret()
    assert secret == sha256((state / "warmpath" / "secret").read_bytes().strip()).digest()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_that_others_may_touch_is_refused(state: Path, mode: int) -> None:
    """The sentence holds the command that mends it. (docs/security.md)"""
    load_secret(state_dir=state)
    (state / "secret").chmod(mode)
    with pytest.raises(SecretError, match="chmod 600"):
        load_secret(state_dir=state)


@pytest.mark.parametrize("secret", ["", "short", " " * 40])
def test_a_short_secret_is_refused(state: Path, monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    """Also an empty variable: a deployment that lost its secret must not quietly make others."""
    monkeypatch.setenv("WARMPATH_SECRET", secret)
    with pytest.raises(SecretError, match="needs 16"):
        load_secret(state_dir=state)


def test_a_named_file_must_exist_and_a_state_directory_must_be_makeable(state: Path, tmp_path: Path) -> None:
    """Neither becomes an OSError."""
    with pytest.raises(SecretError, match="no secret file"):
        load_secret(secret_file=tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(SecretError, match=r"set \$WARMPATH_SECRET instead"):
        load_secret(state_dir=tmp_path / "file" / "state")


@pytest.mark.parametrize("same_bytes", [1, 2, 4, 16, 31])
def test_all_of_a_keys_digest_counts(same_bytes: int) -> None:
    """A configured digest that begins as the key's does, and goes on otherwise, is another key's."""
    key, digest = make_api_key()
    other = digest[: 2 * same_bytes] + "".join("%x" % (15 - int(digit, 16)) for digit in digest[2 * same_bytes :])
    tenants = Tenants([TenantConfig(name="acme", key_sha256=[other])], SECRET, operator_key_sha256=[other])
    with pytest.raises(AuthenticationFailed):
        tenants.authenticate(f"Bearer {key}")
    assert not tenants.is_operator(f"Bearer {key}")


def test_operators_keys_are_compared_in_constant_time_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constant-time function is the only way in which keys are compared. (docs/security.md)"""
    keys = [make_api_key() for _ in range(3)]
    tenants = Tenants([], SECRET, operator_key_sha256=[digest for _, digest in keys])
    compared: list[bytes] = []

    class Never:
        """Finds no two keys equal."""

        @staticmethod
        def compare_digest(known: bytes, digest: bytes) -> bool:
            compared.append(known)
            return False

    monkeypatch.setattr(tenancy, "hmac", Never)
    assert not tenants.is_operator(f"Bearer {keys[0][0]}")
    assert compared == [bytes.fromhex(digest) for _, digest in keys]
