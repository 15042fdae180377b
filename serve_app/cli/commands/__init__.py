"""The subcommands of `warmpath` that start no server: keys, a batch file, a plan."""
