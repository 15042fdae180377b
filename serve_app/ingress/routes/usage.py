"""What was used, by day, tenant, model and registered prompt."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.openai.response import openai_error
from serve_app.errors import InvalidRequest
from serve_app.ingress.http import json_response
from serve_app.ingress.routes.handler import Front, guarded
from serve_app.usage.report import days, usage_csv, usage_document

router = APIRouter(tags=["usage"])

FORMATS = ("json", "csv")


@router.get("/v1/usage")
@guarded("usage", openai_error)
async def usage(request: Request, services: Front) -> Response:
    """Tokens read from the cache, written and computed; a tenant sees its own.

    In the query: `start_date` and `end_date` (days in UTC; default: the last 30), `format` (json or csv).
    """
    tenant = None if services.guard.sees_all(request) else services.guard.tenant(request).name
    query = request.query_params
    wanted = query.get("format", "json")
    if wanted not in FORMATS:
        raise InvalidRequest(f"format must be one of {', '.join(FORMATS)}.", param="format")
    first_day, last_day = days(query.get("start_date"), query.get("end_date"), datetime.now(UTC).date())
    rows = await services.usage.everywhere(first_day, last_day, tenant)
    if wanted == "csv":
        return Response(usage_csv(rows), media_type="text/csv; charset=utf-8")
    return json_response(usage_document(first_day, last_day, rows))
