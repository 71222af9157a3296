"""Text in and out: tokenizer, chat templates, incremental decoding and stop strings."""
