"""The kinds of servers that can be asked, a file each: `servers.py` finds every ``Dialect`` of this folder."""
