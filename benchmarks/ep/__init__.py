"""Communication: dispatch and combine between ranks, on CPUs and over NVLink, beside DeepEP."""
