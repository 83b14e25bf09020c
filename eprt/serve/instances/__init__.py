"""Several instances behind one HTTP port: prefill and decode apart (docs/prefill-decode.md)."""
