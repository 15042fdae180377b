"""The warmpath application: HTTP ingress, tenants, tokenizer, and the replicas with their engine and cache."""
