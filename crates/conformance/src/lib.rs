//! One behaviour suite that every oxccl process group must pass, against a scalar oracle.
