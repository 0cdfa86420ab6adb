"""Conversations whose tokens the server remembers, and the KV that is held for them."""
