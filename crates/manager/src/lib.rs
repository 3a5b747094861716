//! Per-rank manager: who takes part in this step, who heals from whom, did it commit.
