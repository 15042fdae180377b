"""Draft models and EAGLE-3 heads: guesses that the model verifies. Knows nothing of scheduling or requests."""
