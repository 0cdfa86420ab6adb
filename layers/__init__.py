"""Tensors in, tensors out: attention, linears, norms, rotary embedding, sampling."""
