"""How bytes leave a process and come back. Each carrier is one module; who decides between them is the planner."""
