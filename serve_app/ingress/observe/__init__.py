"""What an ingress shows of itself: metrics, cache state, explanations."""
