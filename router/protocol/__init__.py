"""The words that replicas, ingresses and routers say to each other: plain data, no state, no sockets."""
