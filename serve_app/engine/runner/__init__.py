"""A transformers model, one packed forward per step. Knows nothing of scheduling, requests or prefixes."""
