"""`warmpath bench`: three questions about a running server, and the client that measures."""
