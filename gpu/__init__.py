"""Facts about device and host, and the mechanism that moves weights."""
