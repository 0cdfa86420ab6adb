"""Attention backends behind one seam (plan once a step, forward per layer)."""
