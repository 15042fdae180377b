"""Opens the database of an environment variable's URL, or else a file."""

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from serve_app.stored import servers
from serve_app.stored.database import Database, DatabaseServer, StorageLimits, StoreError
from serve_app.stored.sqlite import open_file

URL_VARIABLE = "WARMPATH_RESPONSES_URL"
"""The environment variable for a database's URL, also of keys, tenants, files and budgets. It is not a setting, because
it may contain a password."""
_URL = re.compile(r"(\w+)://([^@/?#]*@)?([\w.,-]+|\[[\da-fA-F:]+\])(:\d+)?([/?].*)?")


def open_database(url: str | None, file: Path, limits: StorageLimits) -> Database:
    """Return the database at a URL, connected on first use, or else the SQLite ``file``.

    Raises StoreError for an invalid URL, a missing client library, or an unusable file.
    """
    if not url:
        return open_file(file, limits)
    server = _server_of(url)
    try:
        return server.open(url, limits)
    except ImportError as error:
        raise StoreError(f"${URL_VARIABLE} needs a client library: pip install '.[{server.extra}]'") from error


def ping(url: str) -> None:
    """Raise an exception, of any class, if the database at a URL does not answer."""
    _server_of(url).ping(url)


def _server_of(url: str) -> DatabaseServer:
    if (match := _URL.fullmatch(url)) is not None:
        for server in _servers():
            if match[1] in server.schemes:
                return server
    *forms, last = sorted((form for server in _servers() for form in server.forms), key=len)
    raise StoreError(
        f"${URL_VARIABLE} must be {', '.join(forms)} or {last}, with user and password percent-encoded before an @"
    )


@cache
def _servers() -> tuple[DatabaseServer, ...]:
    def each() -> Iterator[DatabaseServer]:
        for module in iter_modules(servers.__path__):
            yield import_module(f"{servers.__name__}.{module.name}").SERVER

    return tuple(each())
