"""What is stored for tenants, sealed: responses, files, batches, keys and budgets, in a database of one protocol."""
