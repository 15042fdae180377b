"""Settings of stored responses."""

from pathlib import Path

from pydantic import BaseModel, Field

from serve_app.config.cache import MIB
from serve_app.config.quantities import Bytes, Seconds

_DAY_S = 86_400.0


class StoredSection(BaseModel):
    """Responses that are kept, for `previous_response_id` and `GET /v1/responses/ID`."""

    store_responses: bool = Field(
        True, description="keep responses, encrypted, unless a request says `store: false`; false: nothing is stored"
    )
    responses_file: Path | None = Field(
        None,
        description="SQLite file of stored responses, for ingresses of one machine, where $WARMPATH_RESPONSES_URL "
        "names no Redis or Postgres; default: beside the state file of the secret, on Ray's head node alone",
    )
    responses_ttl_s: Seconds = Field(30 * _DAY_S, ge=1, le=3650 * _DAY_S, description="a response is kept for so long")
    responses_max_bytes: Bytes = Field(
        1024 * MIB, ge=16 * MIB, description="kept for each tenant, compressed; beyond it the oldest leave"
    )
