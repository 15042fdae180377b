"""All families by name. What is not here is not shown: a replica cannot bring families or labels of its own."""

from __future__ import annotations

from serve_app.ingress.observe.families import clients, replicas, routers
from serve_app.ingress.observe.families.family import Family

SECTIONS = (*clients.SECTIONS, *replicas.SECTIONS, *routers.SECTIONS)

FAMILIES: dict[str, Family] = {family.name: family for section in SECTIONS for family in section.families}
