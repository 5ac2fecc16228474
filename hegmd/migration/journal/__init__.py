"""The journal of operations: its bytes, its file, and the operations that it holds."""
