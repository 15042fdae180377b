"""Checks for problems that would keep an instance from working: for `warmpath serve`, `check FILE` and `doctor`."""
