"""Names, defaults and bounds of every setting. Imports nothing of ours, and no torch."""
