"""Operations that change a subject's partitions: planned, journaled, and driven until done."""
