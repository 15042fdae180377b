"""Authentication of tenants and their permissions. Uses no HTTP and no tokens."""
