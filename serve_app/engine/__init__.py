"""Engines: the contract (``protocol``, ``settings``, ``step``, ``metrics``) and the built-in one's rooms."""
