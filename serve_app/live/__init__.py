"""Live events: the table of prefixes, the counts, and the part of them that each viewer sees. No HTTP, no Ray."""
