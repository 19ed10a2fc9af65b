"""What a training step will take of a device's memory, before it is taken."""
