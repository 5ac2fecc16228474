"""The socket protocol without the socket: frames, codec, messages and who may say what when. Does no I/O."""
