"""From text to moments: everything a closed-form fit needs, in one streaming pass over both models."""
