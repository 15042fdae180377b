"""What an answer must look like, token by token. Knows no HTTP, models or engines; only here is llguidance imported."""
