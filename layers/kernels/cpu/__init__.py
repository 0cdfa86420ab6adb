"""Native CPU kernels: C++ sources, built on first use, behind a plain C ABI (kernels.h)."""
