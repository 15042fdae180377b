"""warmpath on Ray clusters."""
