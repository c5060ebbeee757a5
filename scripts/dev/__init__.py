"""Programs for whoever works on this project."""
