"""What a router can tell of itself: counters, state, explanations."""
