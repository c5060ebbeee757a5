"""Scripts that print the figures of the README and of logs/."""
