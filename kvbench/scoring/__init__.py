"""Arms through lm-eval: many ways to answer, the same items, one path."""
