"""Layers: EPMoE, gate, experts, latent attention, norms, rotary embedding, and the overlap schedules that run them."""
