"""HTTP: the only package that uses starlette and fastapi. It knows nothing of scoring, blocks or engines."""
