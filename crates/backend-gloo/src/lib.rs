//! oxccl's CPU backend: collectives over TCP in pure Rust.
