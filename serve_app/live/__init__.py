"""What happens now, for whoever watches: a table of prefixes, events, and who may see which. No HTTP, no Ray."""
