"""The messages between replicas, ingresses and routers: plain data without state or sockets."""
