"""Who sends what when: the traffic of many tenants through a day. Pure: no text, no clock, no server."""
