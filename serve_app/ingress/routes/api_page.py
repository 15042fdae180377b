"""``/docs``: Swagger UI, from the package swagger-ui-bundle, so that it works without a network."""

from functools import cache

from starlette.responses import Response

from serve_app.ingress.routes import page

_FILES = ("swagger-ui.css", "swagger-ui-bundle.js")
# Swagger UI's style sheet has pictures inside.
_HEADERS = page.HEADERS | {
    "content-security-policy": page.HEADERS["content-security-policy"].replace("img-src 'self'", "img-src 'self' data:")
}
# Its paths are relative, because the application may have a prefix, and a proxy in front may add one.
_PAGE = b"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>API: warmpath</title>
<link rel="icon" href="page/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="docs/swagger-ui.css">
<script src="docs/swagger-ui-bundle.js" defer></script>
<script src="page/docs.js" type="module"></script>
</head>
<body>
<main id="api"></main>
</body>
</html>
"""


def api_page(etags: str | None) -> Response:
    """Return the page. ``etags``: the browser's tags (``If-None-Match``)."""
    return page.static(_PAGE, "html", etags, _HEADERS)


def api_page_file(name: str, etags: str | None) -> Response:
    """Return one of Swagger UI's files that the page loads. Raises HTTPException: 404."""
    return page.static(_files().get(name), name.rpartition(".")[2], etags)


@cache
def _files() -> dict[str, bytes]:
    from swagger_ui_bundle import swagger_ui_path  # here: what serves models does not need it

    return {name: (swagger_ui_path / name).read_bytes() for name in _FILES}
