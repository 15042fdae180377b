"""This process's routers inside Ray Serve LLM.

Serve's deployment classes are copies, with the objects that they name; functions of another module are not copied.
"""

from typing import Any

_routers: dict[tuple[str, str], Any] = {}


def register(application: str, deployment: str, router: Any) -> None:
    """Note the latest ``WarmRouter`` of a deployment."""
    _routers[application, deployment] = router


def router_of(application: str, deployment: str) -> Any:
    """Return it, None where this process has none yet."""
    return _routers.get((application, deployment))
