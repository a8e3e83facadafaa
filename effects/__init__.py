"""How weights move, and how they move back."""
