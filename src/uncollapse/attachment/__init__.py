"""Writing into somebody else's model: which places are meant, and the hooks that change tokens there."""
