"""KV below the pool: host memory and disk."""
