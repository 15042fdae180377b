"""The reasons for cache misses, found by comparison with the tenant's earlier prompts. Uses no Ray and no HTTP."""
