"""GGUF files: what they hold (reader), the values of their blocks (blocks), names, config and tokenizer."""
