"""Live events: the table of prefixes, the figures, and the part of them that each viewer sees. No HTTP, no Ray."""
