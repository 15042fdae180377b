"""Sources of models: a name, a path or a hub id -> a directory on this machine. No torch in this process."""
