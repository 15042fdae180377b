"""Running warmpath on Ray clusters."""
