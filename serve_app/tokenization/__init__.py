"""Text <-> token ids, exactly, cached. Knows no tenants and no requests."""
