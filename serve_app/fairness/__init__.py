"""Who is next, and who must wait, where tenants share a thing: places, bytes, threads. Knows no HTTP and no Ray."""
