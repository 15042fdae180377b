"""Wire formats <-> ``GenerateRequest``. Knows no tokens, tenants or HTTP."""
