"""One rank's engine: scheduler, paged KV cache, sampler, drafts, recorded steps; LLM for offline use. No HTTP."""
