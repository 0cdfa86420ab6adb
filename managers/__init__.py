"""The processes of the engine: tokenizer manager, scheduler, detokenizer, and the messages between them."""
