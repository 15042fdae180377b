"""`warmpath bench`: three measurements of a running server, and their client."""
