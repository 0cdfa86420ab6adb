"""Slots, rows and the prefix tree: which KV slot holds which token. Nothing here knows a request or a policy."""
