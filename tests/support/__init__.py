"""What the tests share: tiny models, comparisons, processes, faults, and training runs."""
