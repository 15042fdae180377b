"""One engine inside Ray Serve. Knows no HTTP, nor where requests should have gone. Imports nothing here: see ``messages``."""
