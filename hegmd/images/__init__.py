"""A job on disk: CRIU, the image's files, and the dump and restore of a whole job."""
