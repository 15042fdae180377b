"""KV that enters or leaves the pool without being computed. Knows no files and no sockets."""
