"""A transformers model, one packed forward a step. Knows no scheduling, requests or prefixes."""
