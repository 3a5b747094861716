//! Conformance of gloo.
fn main() {}
