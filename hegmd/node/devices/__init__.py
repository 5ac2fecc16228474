"""GPUs and who is on them, by vendor. Each vendor's binding is imported by its own module and nowhere else."""
