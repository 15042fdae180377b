"""What is known of a model, its adapters and its drafter before anything is loaded. No torch."""
