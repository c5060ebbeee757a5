"""Tools that run from the checkout, each with `python -m scripts.NAME`."""
