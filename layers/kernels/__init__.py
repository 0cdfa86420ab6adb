"""Kernels and the one door to fused operations (ops.py)."""
