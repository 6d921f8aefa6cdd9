"""What a step takes, on paper: memory, time, devices, links."""
