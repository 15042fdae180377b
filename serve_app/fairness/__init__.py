"""Fair shares and turns of tenants for a shared resource: places, bytes or threads. Uses no HTTP and no Ray."""
