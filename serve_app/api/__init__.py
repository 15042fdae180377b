"""Convert wire formats to and from ``GenerateRequest``. This package knows nothing of tokens, tenants or HTTP."""
