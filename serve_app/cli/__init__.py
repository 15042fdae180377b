"""The command line of ``warmpath``. It calls the other packages and holds no serving logic."""
