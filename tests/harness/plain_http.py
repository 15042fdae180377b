"""For ``httpx``, which would load certificates for every client it makes, also of plain HTTP."""

from __future__ import annotations

import ssl

NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
