"""One file per way to compute the same function; dispatch asks each what it can serve."""
