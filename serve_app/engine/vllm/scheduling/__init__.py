"""Service, preemption and eviction by tenant in vLLM's scheduler and block pool."""
