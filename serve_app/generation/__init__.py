"""A validated request becomes token streams. Knows no HTTP, wire formats or engines' insides."""
