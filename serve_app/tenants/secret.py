"""The deployment secret: from the environment, from a private file, or created once."""

import os
import secrets
import stat
import tempfile
from hashlib import sha256
from pathlib import Path

MIN_SECRET_CHARS = 16
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


def _read_secret(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read()
    except FileNotFoundError:
        raise SecretError(f"there is no secret file {path}; create it, or remove secret_file") from None
    except OSError as error:
        raise SecretError(f"cannot read the secret file {path} ({error.strerror})") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecretError(f"others may read the secret file {path}; run: chmod 600 {path}")
    return _normalized(content, str(path))


def _normalized(secret: bytes, source: str) -> bytes:
    secret = secret.strip()
    if len(secret) < MIN_SECRET_CHARS:
        raise SecretError(
            f"the secret in {source} has {len(secret)} characters and needs {MIN_SECRET_CHARS}; "
            "make one with: openssl rand -hex 32"
        )
    return sha256(secret).digest()
