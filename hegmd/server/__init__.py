"""The daemon's face to other programs: the socket, who may do what, and what each request is answered with."""
