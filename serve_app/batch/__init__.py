"""Files and batches of requests in the store, and who runs them in which order."""
