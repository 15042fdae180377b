"""Each replica's load as this router knows it. Uses no caches, feeds or scores."""
