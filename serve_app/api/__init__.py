"""Wire formats: OpenAI (and later Anthropic) bodies <-> one internal GenerateRequest."""
