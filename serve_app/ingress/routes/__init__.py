"""The HTTP routes, one file an API. Knows the services of one ingress, nothing below them."""
