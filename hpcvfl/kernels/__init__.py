"""Arrays in, arrays out: bit packing, range scans, the uniform quantiser and its dither (numba)."""
