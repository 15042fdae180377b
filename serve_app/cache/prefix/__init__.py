"""The KV pool's prefix cache: index, reference counts, pins, quotas."""
