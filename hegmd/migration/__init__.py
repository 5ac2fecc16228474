"""Operations that move a job's bytes: planned and decided without I/O here, carried out by the runner alone."""
