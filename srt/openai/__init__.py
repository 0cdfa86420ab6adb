"""OpenAI-compatible endpoints over the tokenizer manager."""
