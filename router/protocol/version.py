"""The version of the messages between the processes of one deployment: which releases may run beside each other.

Messages carry it, and replicas advertise it. A number stands for one layout of every message, to which fields may only
be appended, with a default; whatever else changes raises the number. Data that outlives processes (files of KV, stored
responses) has formats of its own.
"""

from collections.abc import Mapping
from typing import Any

WIRE_VERSION = 1
"""Of this code."""

UNTOLD = 0
"""Of replicas that advertise none: those of 0.2.0 and before, whose messages had other layouts."""

VERSION_METADATA = "version"
"""The key under which replicas and ingresses advertise it to Serve."""


class OtherVersion(ValueError):
    """A message is from a release of warmpath that this one does not understand."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"the sender's messages have version {version}, and this release reads version {WIRE_VERSION}: run the two "
            "releases as two applications (docs/how-to/upgrade.md)"
        )
        self.version = version


def mixes(version: int) -> bool:
    """Return whether processes with messages of this version understand this one, and the other way round."""
    return version == WIRE_VERSION


def version_of(advertised: Mapping[str, Any]) -> int:
    """Return the version that a process advertises, ``UNTOLD`` for none or none that can be read."""
    version = advertised.get(VERSION_METADATA, UNTOLD)
    return version if isinstance(version, int) else UNTOLD


def check_version(version: int) -> None:
    """Raise OtherVersion if a message's version does not mix with this one."""
    if not mixes(version):
        raise OtherVersion(version)
