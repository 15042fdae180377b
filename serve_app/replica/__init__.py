"""One engine inside Ray Serve. Knows no HTTP. Imports nothing: ingresses read ``messages`` and must not load torch."""
