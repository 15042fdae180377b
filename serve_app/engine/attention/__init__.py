"""Ways to attend to the paged pool. Knows nothing of models, scheduling or requests."""
