"""Who may talk to whom: finding models, comparing their configurations and tokenizers, loading them, and the gates on the loaded pair."""
