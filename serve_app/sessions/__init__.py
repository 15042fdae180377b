"""Sessions: chains of requests that continue each other, as seen by one replica."""
