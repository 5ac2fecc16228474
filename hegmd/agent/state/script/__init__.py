"""Which of a script's variables belong to its state, and how they get their values back."""
