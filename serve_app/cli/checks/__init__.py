"""What would keep an instance from working: asked by `warmpath serve`, `check FILE` and `doctor`."""
