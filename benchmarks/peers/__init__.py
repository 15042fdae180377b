"""Other systems under the same workloads, each in a process of its own; ``vllm_cpu`` imports only this package."""
