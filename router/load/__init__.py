"""How busy each replica is, seen from this router. Knows no caches, no feeds and no scores."""
