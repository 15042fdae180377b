"""Why a prompt was not read from the cache: what differs from its tenant's earlier ones. Knows no Ray and no HTTP."""
