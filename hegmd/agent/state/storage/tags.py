"""The tags of a state's tree: one byte each, never given a second meaning. A new one is a new version of the file."""

from __future__ import annotations

NONE, FALSE, TRUE = b"N", b"0", b"1"
INT, FLOAT, COMPLEX = b"i", b"f", b"c"
STR, BYTES, BYTES_BESIDE, BYTEARRAY, BYTEARRAY_BESIDE = b"s", b"b", b"B", b"y", b"Y"
LIST, TUPLE, SET, FROZENSET, DEQUE = b"l", b"t", b"e", b"E", b"q"
# Followed by the tag of the bytes that hold them, eight each.
LIST_OF_INTS, TUPLE_OF_INTS = b"L", b"T"
DICT, ORDERED_DICT, COUNTER, DEFAULT_DICT = b"d", b"o", b"C", b"D"
# A value that occurred before, by its number.
AGAIN = b"="
TENSOR, TORCH_SIZE, DTYPE, DEVICE = b"X", b"z", b"p", b"v"
ARRAY, ARRAY_OF_COLUMNS, NUMPY_SCALAR = b"a", b"A", b"n"

# The deepest nesting of containers. Python itself ends at 1000 calls, some of which the job's own code uses.
MAX_DEPTH = 100
