"""A training script of another project: nothing in here knows of token slices."""
