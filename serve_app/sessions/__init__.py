"""Sessions: chains of requests that go on from each other, as a replica sees them."""
