"""Pure planning: which method, carrier and target, what prevents it, and how long it takes."""
