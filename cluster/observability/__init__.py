"""What Prometheus and Grafana show of warmpath and when they call somebody: tables, and the files made from them."""
