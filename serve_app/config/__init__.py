"""Names, defaults and bounds of every setting, and their page in ``docs/``. Imports no other package, and no torch."""
