"""What vLLM's scheduler and block pool do by tenant: who is served, preempted and evicted."""
