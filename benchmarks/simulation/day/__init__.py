"""A simulated day: replicas come and go by a rule of scaling, the traffic is that of many tenants."""
