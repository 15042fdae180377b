"""How busy each replica is, seen from this router. Knows no caches and no scores."""
