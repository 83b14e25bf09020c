"""Doors for users of other libraries: DeepEP's interface and transformers' MoE blocks. Nothing inside imports them."""
