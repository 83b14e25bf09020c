"""Models: DeepSeek V2, V3 and R1 from a Hugging Face directory; each rank reads only its own experts."""
