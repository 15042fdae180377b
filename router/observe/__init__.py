"""A router's counters, state and explanations."""
