"""The traffic of many tenants during a day, as pure data: no text, no clock, no server."""
