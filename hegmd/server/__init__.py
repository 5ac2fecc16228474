"""The daemon's face to clients: the socket, permissions, and the answer to each request."""
