"""Facts about a model and its adapters that are available without loading them. No torch."""
