"""What would keep an instance from working: one list of checks, for `warmpath serve`, `check FILE` and `doctor`."""
