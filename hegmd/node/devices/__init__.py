"""GPUs and the processes on them, by vendor. Only its own module imports a vendor's binding."""
