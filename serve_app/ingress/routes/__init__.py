"""The HTTP routes, one file for each API. They use the services of one ingress and nothing below them."""
