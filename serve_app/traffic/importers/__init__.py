"""Other forms of recorded requests, read one after the other into our form: with ids, with text, or a log of vLLM."""
