"""From match and load to a ranking. Pure: knows no clock, lock, socket or counter."""
