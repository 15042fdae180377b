"""The KV tiers below the pool: host memory and disk."""
