"""The memory of a training step, predicted before the step is run."""
