"""HTTP: the only room that knows starlette and fastapi. Knows no scoring, blocks or engines."""
