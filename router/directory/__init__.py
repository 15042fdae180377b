"""The blocks that each replica holds or will soon hold. Uses no load, policy or socket."""
