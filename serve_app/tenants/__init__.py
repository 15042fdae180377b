"""Who asks and what they may use. Knows no HTTP and no tokens."""
