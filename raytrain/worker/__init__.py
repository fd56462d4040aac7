"""What runs in a training process: the loop, its step, and the process group of a generation."""
