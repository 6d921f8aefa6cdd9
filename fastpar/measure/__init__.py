"""What a step takes here: clocks, rates, short runs."""
