"""Ways to attend to the paged pool. Knows no models."""
