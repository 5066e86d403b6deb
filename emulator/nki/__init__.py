"""NKI on a CPU: runs kernel functions of both dialects, enforces the hardware's limits, records what they did."""
