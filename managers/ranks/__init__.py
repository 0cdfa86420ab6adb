"""The schedulers of one engine: which ranks there are, how messages reach them all, and who is still alive."""
