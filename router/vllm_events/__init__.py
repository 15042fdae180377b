"""KV events in vLLM's form, which SGLang has, too: subscription, decoding, ordering, and translation to our hashes."""
