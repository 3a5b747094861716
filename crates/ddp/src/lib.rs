//! Fault-tolerant data parallel: bucketed gradient averaging over plain slices.
