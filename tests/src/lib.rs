//! Cross-crate tests: real processes, real sockets, real kills.
