# A package without types of its own.
