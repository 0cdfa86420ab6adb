"""Loads a model and runs its forward passes, one step at a time."""
