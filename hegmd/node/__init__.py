"""The facts about this node: devices, processes, inventory, possible migration methods, and the doctor's checks."""
