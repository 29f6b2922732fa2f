"""What a mapper does to the target, beyond its score."""
