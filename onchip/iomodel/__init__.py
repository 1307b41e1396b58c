"""Where the bytes go and how long it takes: devices, on-chip memory, rooflines."""
