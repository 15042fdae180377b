"""From match and load to a ranking. Pure: uses no clock, lock, socket or counter."""
