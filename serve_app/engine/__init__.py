"""Engines: the contract (``protocol``, ``settings``, ``step``, ``metrics``) and the parts of the built-in one."""
