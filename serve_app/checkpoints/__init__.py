"""What is known of a model and its adapters before anything is loaded. No torch."""
