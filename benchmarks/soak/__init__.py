"""Everything at once for long, and an audit of what is left."""
