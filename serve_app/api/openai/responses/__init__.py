"""OpenAI's responses, and the conversations that are stored with them."""
