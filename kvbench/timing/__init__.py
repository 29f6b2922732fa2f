"""What a transfer costs: time by phase, the floor the hardware sets, memory, and plans from configurations alone."""
