"""The words of `warmpath` that start nothing: keys, a batch file, a plan."""
