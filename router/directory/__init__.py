"""Which replica holds, or is about to hold, which block. Knows no load, policy or socket."""
