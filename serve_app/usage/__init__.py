"""What tenants used, by day, and what it would have cost. Knows no HTTP and no Ray."""
