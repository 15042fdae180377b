"""API keys (as SHA-256) -> tenant; deployment secret and tenant -> a salt that others cannot guess.

The secret comes from the environment or a private file, or is created once.
"""

import hmac
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from serve_app.config.tenants import TenantConfig
from serve_app.errors import AuthenticationFailed, Overloaded

MIN_SECRET_CHARS = 16
WORKER_KEY_VARIABLE = "WARMPATH_WORKER_KEY"
SECRET_VARIABLE = "WARMPATH_SECRET"  # noqa: S105  # its name


class SecretError(ValueError):
    """The deployment secret cannot be used. The message contains the remedy."""


def load_secret(env: str = SECRET_VARIABLE, secret_file: Path | None = None, state_dir: Path | None = None) -> bytes:
    """Return the deployment secret as 32 bytes: from the environment, else the file, else a file created once.

    The new file is ``secret`` in ``state_dir`` (default ``$XDG_STATE_HOME/warmpath``, or ``~/.local/state/warmpath``),
    with mode 0600. Raises SecretError for a short secret, and for a file that other users may read.
    """
    given = os.environ.get(env)
    if given is not None:
        return _normalized(given.encode("utf-8", "surrogateescape"), f"${env}")
    if secret_file is not None:
        return _read_secret(secret_file)
    path = (own_state_dir() if state_dir is None else state_dir) / "secret"
    try:
        if not path.is_file():
            _create_secret(path)
    except OSError as error:
        raise SecretError(f"cannot make the secret file {path} ({error.strerror}); set ${env} instead") from error
    return _read_secret(path)


def forget_secret() -> None:
    """Remove the secret from this process' environment, and so from that of processes that it starts later."""
    os.environ.pop(SECRET_VARIABLE, None)


def own_state_dir() -> Path:
    """Return the directory for a user's persistent state."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "warmpath"


def _create_secret(path: Path) -> None:
    """Write a random secret to ``path`` atomically, unless another process is first."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(prefix=".secret-", dir=path.parent)  # mkstemp sets mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        path.hardlink_to(name)
    except FileExistsError:
        pass
    finally:
        Path(name).unlink()


def worker_key(file: Path | None) -> str:
    """Return the API key for servers that already run, "" for none. Raises SecretError as ``load_secret``."""
    if file is not None:
        return _read_private(file, "worker_key_file").decode(errors="replace").strip()
    return os.environ.get(WORKER_KEY_VARIABLE, "")


def _read_secret(path: Path) -> bytes:
    return _normalized(_read_private(path, "secret_file"), str(path))


def _read_private(path: Path, setting: str) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read()
    except FileNotFoundError:
        raise SecretError(f"there is no secret file {path}; create it, or remove {setting}") from None
    except OSError as error:
        raise SecretError(f"cannot read the secret file {path} ({error.strerror})") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecretError(f"others may read the secret file {path}; run: chmod 600 {path}")
    return content


def _normalized(secret: bytes, source: str) -> bytes:
    secret = secret.strip()
    if len(secret) < MIN_SECRET_CHARS:
        raise SecretError(
            f"the secret in {source} has {len(secret)} characters and needs {MIN_SECRET_CHARS}; "
            "make one with: openssl rand -hex 32"
        )
    return sha256(secret).digest()


DEFAULT_TENANT = "default"


def life_name(name: str, number: int) -> str:
    """Return the name of a name's ``number``-th life. No tenant can be called so, as ``~`` is in no name."""
    return name if number == 1 else f"{name}~{number}"


def name_of(life: str) -> str:
    """Return the name that operators and settings use for a tenant."""
    return life.partition("~")[0]


@dataclass(frozen=True, slots=True)
class Tenant:
    """An authenticated tenant. Tenants of one ``trust_group`` share their KV. ``name``: of its life (``name_of``).

    ``models``: names of its models and adapters, None: all. ``store_kv``: its requests may write to the cache.
    """

    name: str
    trust_group: str | None = None
    models: frozenset[str] | None = None
    store_kv: bool = True


@dataclass(frozen=True, slots=True)
class _Key:
    """``expires_s``: in seconds since 1970, None: never. ``disabled``: its tenant is."""

    digest: bytes
    tenant: Tenant
    expires_s: float | None
    revoked: bool
    disabled: bool


class Tenants:
    """All tenants of a deployment. ``TenantsSection`` ensures that names and keys differ.

    ``aliases``: other names of models, as they may stand in the tenants' lists, too.
    """

    def __init__(
        self,
        configs: Sequence[TenantConfig],
        secret: bytes,
        *,
        operator_key_sha256: Sequence[str] = (),
        aliases: Mapping[str, str] = MappingProxyType({}),
        refusal: str = "",
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._secret = secret
        self._now_s = now_s
        self.configure(configs, operator_key_sha256, aliases, refusal)

    def configure(
        self,
        configs: Sequence[TenantConfig],
        operator_key_sha256: Sequence[str],
        aliases: Mapping[str, str] = MappingProxyType({}),
        refusal: str = "",
    ) -> None:
        """Replace tenants and operators. Authenticated requests stay authenticated. ``aliases``: names of models.

        ``refusal``: why every client is refused, "": none is. Operators still are known.
        """
        self.aliases = aliases
        self.refusal = refusal
        self.open = not configs and not refusal
        """Whether no tenant is configured. Every client then is the tenant ``default``."""
        resolved = [(config, _tenant(config, aliases)) for config in configs]
        self._keys = {
            (digest := bytes.fromhex(key.sha256)): _Key(
                digest, tenant, key.expires.timestamp() if key.expires else None, key.revoked, config.disabled
            )
            for config, tenant in resolved
            for key in config.key_sha256
        }
        default = {DEFAULT_TENANT: Tenant(DEFAULT_TENANT)} if self.open else {}
        self._by_name = default or {tenant.name: tenant for config, tenant in resolved if not config.disabled}
        self._lives = {name_of(config.name): config.name for config in configs}
        self._operator_keys = [bytes.fromhex(key) for key in operator_key_sha256]

    @property
    def has_operators(self) -> bool:
        """Whether operator keys exist."""
        return bool(self._operator_keys)

    def authenticate(self, authorization: str | None) -> Tenant:
        """Return the tenant of the Authorization header's key, found by its digest and compared in constant time.

        The time of a look-up can only tell of a digest, from which no key follows.
        Unless the deployment is ``open``, raises AuthenticationFailed without a key, or with an unknown, revoked or
        expired one. Raises Overloaded while every client is refused.
        """
        if self.open:
            return Tenant(DEFAULT_TENANT)
        if self.refusal:
            raise Overloaded(self.refusal, code="tenants_missing", retry_after_s=5)
        digest = _bearer_digest(authorization)
        entry = self._keys.get(digest)
        if entry is None or not hmac.compare_digest(entry.digest, digest):
            if self.is_operator(authorization):
                raise AuthenticationFailed("An operator key cannot be used for this; send a tenant's key.")
            scheme, _, key = (authorization or "").strip().partition(" ")
            wrong = "No tenant has this API key; send a valid one"
            if not key and scheme.lower() in ("", "bearer"):
                wrong = "An API key is needed; send it"
            elif scheme.lower() != "bearer":
                wrong = "The Authorization header does not begin with `Bearer`; send the key"
            raise AuthenticationFailed(f"{wrong} as `Authorization: Bearer KEY`.")
        if entry.revoked:
            raise AuthenticationFailed("This API key was revoked; use another one.")
        if entry.disabled:
            raise AuthenticationFailed("The tenant of this API key is disabled; ask its operator.")
        if entry.expires_s is not None and entry.expires_s <= self._now_s():
            expired = datetime.fromtimestamp(entry.expires_s, UTC).isoformat()
            raise AuthenticationFailed(f"This API key expired at {expired}; use a newer one.")
        return entry.tenant

    @property
    def by_name(self) -> dict[str, Tenant]:
        """The tenants by name, without disabled ones; only ``default`` if none is configured."""
        return self._by_name

    def named(self, name: str) -> str:
        """Return the tenant that bears a name now; if none does, the name itself."""
        return self._lives.get(name, name)

    def is_operator(self, authorization: str | None) -> bool:
        """Return whether the header contains an operator key."""
        digest = _bearer_digest(authorization)
        matches = [hmac.compare_digest(operator, digest) for operator in self._operator_keys]
        return any(matches)

    @staticmethod
    def operator_id(authorization: str | None) -> str:
        """Return the name of an operator's key for the log of changes. No key follows from it."""
        return f"operator_{_bearer_digest(authorization).hex()[:16]}"

    def salt(self, tenant: Tenant, cache_salt: str | None) -> bytes:
        """Return the 32-byte salt of a tenant's or trust group's scope, which a ``cache_salt`` divides further.

        HMAC-SHA256 keyed with the secret over length-prefixed fields. No client's ``cache_salt`` can reach another
        scope, and a missing one differs from the empty one.
        """
        message = _length_prefixed(tenant.name.encode())
        if tenant.trust_group is not None:
            # No tenant has an empty name, so a group never equals a tenant of the same name.
            message = _length_prefixed(b"") + _length_prefixed(tenant.trust_group.encode())
        if cache_salt is not None:
            message += b"\1" + _length_prefixed(cache_salt.encode())
        else:
            message += b"\0"
        return hmac.digest(self._secret, message, "sha256")


def _tenant(config: TenantConfig, aliases: Mapping[str, str]) -> Tenant:
    models = None if config.models is None else frozenset(aliases.get(name, name) for name in config.models)
    return Tenant(config.name, config.trust_group, models, config.store_kv)


def make_api_key() -> tuple[str, str]:
    """Return a new API key and its SHA-256 in hex, for a settings file."""
    key = "wp-" + secrets.token_urlsafe(32)
    return key, sha256(key.encode()).hexdigest()


def _bearer_digest(authorization: str | None) -> bytes:
    scheme, _, key = (authorization or "").strip().partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else ""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def _length_prefixed(field: bytes) -> bytes:
    return len(field).to_bytes(8, "little") + field
