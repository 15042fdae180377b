"""Postgres."""

from typing import Any

from serve_app.stored.database import TIMEOUT_S, DatabaseServer, StorageLimits
from serve_app.stored.sql import TABLES, SqlDatabase

_BEGIN = f"""
SET synchronous_commit = on; SET statement_timeout = '{TIMEOUT_S}s';
SELECT pg_advisory_xact_lock(hashtext('stored_responses')); {TABLES}
"""
"""One transaction under a lock, because two at once would both create the tables, and one would fail."""


class Postgres(SqlDatabase):
    """Every change is on the server's disk before it is acknowledged."""

    def __init__(self, url: str, limits: StorageLimits) -> None:
        import psycopg

        super().__init__(limits, (psycopg.Error, OSError))
        self._url = url

    def dialect(self, statement: str) -> str:
        """See ``SqlDatabase``."""
        return statement.replace("BLOB", "BYTEA").replace("?", "%s")

    def connect(self) -> Any:
        """See ``SqlDatabase``."""
        import psycopg

        timeout_s = TIMEOUT_S
        connection = psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=timeout_s,
            tcp_user_timeout=timeout_s * 1000,
            prepare_threshold=None,
        )
        connection.execute(self.dialect(_BEGIN))
        return connection


def _ping(url: str) -> None:
    import psycopg

    psycopg.connect(url, connect_timeout=TIMEOUT_S).close()


SERVER = DatabaseServer(
    schemes=("postgresql", "postgres"),
    forms=("postgresql://HOST/DATABASE",),
    extra="postgres",
    open=Postgres,
    ping=_ping,
)
