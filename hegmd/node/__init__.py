"""What this node is: devices, processes, inventory, possible migration methods, and the doctor's checks."""
