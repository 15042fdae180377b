"""Other systems under the same workloads, each in a separate process; ``vllm_cpu`` imports only this package."""
