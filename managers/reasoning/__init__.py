"""The model's thinking: how it is marked, split from the answer, and counted."""
